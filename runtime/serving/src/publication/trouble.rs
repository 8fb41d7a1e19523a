//! The pace of a follower's looks while a newer model cannot be taken.

use std::time::Duration;

/// The longest time between two looks while a model cannot be taken. A full model is loaded at each
/// of them.
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// The present reason why the newest model cannot be taken.
#[derive(Debug, Default)]
pub struct Trouble {
    reason: Option<String>,
    /// Looks with a reason, in a row.
    looks: u32,
}

impl Trouble {
    /// Notes the result of a look. Tells `failed` if there is a reason, and logs a reason that is
    /// new.
    pub fn note(&mut self, reason: Option<String>, failed: impl FnOnce()) {
        self.looks = if reason.is_some() { self.looks.saturating_add(1) } else { 0 };
        if let Some(error) = &reason {
            failed();
            if self.reason.as_ref() != Some(error) {
                tracing::warn!(%error, "the newest model cannot be taken; the server looks again");
            }
        }
        self.reason = reason;
    }

    /// The time until the next look: `every` without trouble. With each look in trouble it doubles,
    /// up to 10 s, or up to `every` if that is longer.
    #[must_use]
    pub fn wait(&self, every: Duration) -> Duration {
        (every * 2_u32.saturating_pow(self.looks.min(16))).min(LONGEST_BACKOFF.max(every))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_in_trouble_are_rarer_and_each_is_counted() {
        let (mut trouble, mut failures) = (Trouble::default(), 0);
        let every = Duration::from_secs(2);
        assert_eq!(trouble.wait(every), every);
        for seconds in [4, 8, 10, 10] {
            trouble.note(Some("gone".to_owned()), || failures += 1);
            assert_eq!(trouble.wait(every).as_secs(), seconds);
        }
        assert_eq!(trouble.wait(Duration::from_secs(60)).as_secs(), 60);
        trouble.note(None, || panic!("there is no trouble"));
        assert_eq!((trouble.wait(every), failures), (every, 4));
    }
}
