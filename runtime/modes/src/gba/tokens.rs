//! The token list (§4.1, algorithm 2 lines 1–6): a queue of ascending values, each repeated M
//! times. The i-th token is first + ⌊i/M⌋. The list is not created for the whole run. Whenever
//! fewer tokens than workers are left, the next value's tokens are appended. The
//! [`crate::gba::Dispatcher`] owns the list.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::GlobalStep;
use crate::Token;
use crate::gba::BufferSize;

/// How the list treats a token whose worker died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LostTokens {
    /// The token vanishes (the paper). Tokens then run ahead of the global step by one value for
    /// every M lost tokens. The decay therefore underestimates staleness by as much, until the next
    /// switch or restart sets the list to the global step.
    #[default]
    Vanish,
    /// The next refill appends one more copy of its value for every lost token. In the long run,
    /// M tokens per value are not lost. Tokens then do not run ahead of the global step, even if
    /// many workers die.
    Replace,
}

/// The token list; see the module's documentation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenList {
    repeats: BufferSize,
    lost_tokens: LostTokens,
    queue: VecDeque<Token>,
    next_value: Token,
    /// Tokens that are lost and not replaced yet.
    owed: u64,
    issued: u64,
    lost: u64,
}

impl TokenList {
    /// An empty list whose first value is the global step `first`.
    #[must_use]
    pub fn new(repeats: BufferSize, lost_tokens: LostTokens, first: GlobalStep) -> Self {
        Self { repeats, lost_tokens, queue: VecDeque::new(), next_value: Token(first.0), owed: 0, issued: 0, lost: 0 }
    }

    /// Fetches a token and refills the list for `workers` workers. Afterwards the list holds fewer
    /// than `workers` + M tokens. If lost tokens are replaced, it may also hold one for each token
    /// lost since the last refill.
    pub fn take(&mut self, workers: usize) -> Token {
        self.refill(workers.max(1));
        let token = self.queue.pop_front().unwrap_or(self.next_value);
        self.issued += 1;
        self.refill(workers);
        token
    }

    /// Records that the worker that held a token is dead.
    pub fn lose(&mut self) {
        self.lost += 1;
        if self.lost_tokens == LostTokens::Replace {
            self.owed += 1;
        }
    }

    /// Tokens fetched so far, lost ones included.
    #[must_use]
    pub fn issued(&self) -> u64 {
        self.issued
    }

    /// Tokens fetched and lost.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Tokens ready to be fetched.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.queue.len()
    }

    fn refill(&mut self, workers: usize) {
        while self.queue.len() < workers {
            let copies = u64::from(self.repeats.get()) + std::mem::take(&mut self.owed);
            self.queue.extend((0..copies).map(|_| self.next_value));
            self.next_value = Token(self.next_value.0 + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_tokens_are_replaced_without_breaking_the_order_if_asked() {
        let m = BufferSize::new(3).unwrap();
        let mut list = TokenList::new(m, LostTokens::Replace, GlobalStep(0));
        let mut taken = Vec::new();
        for i in 0..3000 {
            taken.push(list.take(5).0);
            if i % 2 == 0 {
                list.lose();
            }
        }
        assert!(taken.is_sorted());
        let unlost = list.issued() - list.lost();
        let ahead = i128::from(*taken.last().unwrap()) - i128::from(unlost / 3);
        assert!(ahead.abs() <= 4, "tokens are {ahead} steps ahead of the tokens not lost");
    }
}
