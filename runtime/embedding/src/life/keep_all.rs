//! Every key that is trained gets a row and keeps it. The table grows with the number of keys.

use super::{Numbers, Refusal, RowLife, Side, SightedKey};
use crate::SpecError;
use crate::log::RowLog;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeepAll;

impl RowLife for KeepAll {
    const SNAPSHOT_TAG: u8 = 0;
    const USES_ROW_WORD: bool = false;

    #[inline(always)]
    fn refusal(self) -> Refusal {
        Refusal::Missing
    }

    fn numbers(self) -> Numbers {
        [0; 4]
    }

    fn validate(self) -> Result<(), SpecError> {
        Ok(())
    }

    #[inline(always)]
    fn admits_at_look_up(self) -> bool {
        true
    }

    #[inline(always)]
    fn sighted(self, _sighted: SightedKey, _side: &mut Side<'_, impl RowLog>) -> Result<(), Refusal> {
        Err(self.refusal())
    }
}
