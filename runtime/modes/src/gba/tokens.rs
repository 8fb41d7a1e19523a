//! The token list (§4.1, algorithm 2 lines 1–6): a queue in which each value stands M times, in ascending order, the i-th token
//! being first + ⌊i/M⌋. It is not written down for the whole run: whenever fewer tokens than workers are left, the next value's
//! are put at its end. Owned by the [`crate::gba::Dispatcher`].

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::GlobalStep;
use crate::Token;
use crate::gba::BufferSize;

/// What happens to the place of a token whose worker died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LostTokens {
    /// Nothing (the paper). Tokens then run ahead of the global step by one value for every M lost, and the decay sees gradients
    /// as that much fresher than they are, until the next switch or restart sets the list to the global step again.
    #[default]
    Vanish,
    /// The value last put into the list is put there once more: of each value, M are not lost in the long run, and tokens do not
    /// run ahead of the global step however many workers die.
    Replace,
}

/// See the module's text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenList {
    repeats: BufferSize,
    lost_tokens: LostTokens,
    queue: VecDeque<Token>,
    next_value: Token,
    /// Lost and not replaced yet.
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

    /// Fetches a token and refills the list for `workers` workers. Fewer than `workers` + M tokens are in it afterwards, and as
    /// many more as were lost since the last refill if lost tokens are replaced.
    pub fn take(&mut self, workers: usize) -> Token {
        self.refill(workers.max(1));
        let token = self.queue.pop_front().unwrap_or(self.next_value);
        self.issued += 1;
        self.refill(workers);
        token
    }

    /// The worker that held a token is dead.
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
        assert!(ahead.abs() <= 4, "tokens are {ahead} steps from what was not lost");
    }
}
