//! Any three tensors: they are refused, or all that `UniqueIds` promises holds. Run with
//! `cargo +nightly fuzz run unique_ids` in `runtime/wire`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rectrain_wire::Tensor;
use rectrain_wire::ids::UniqueIds;

fuzz_target!(|input: (Vec<u64>, Vec<u32>, Result<Vec<u16>, Vec<u32>>, u32)| {
    let (keys, starts, samples, sample_count) = input;
    let samples = samples.map_or_else(Tensor::from, Tensor::from);
    let Ok(ids) = UniqueIds::from_tensors([keys.into(), starts.into(), samples], sample_count) else {
        return;
    };
    let mut occurrences = 0;
    for (_, samples) in ids.iter() {
        let before = occurrences;
        for sample in samples {
            assert!(sample < ids.sample_count());
            occurrences += 1;
        }
        assert!(occurrences > before);
    }
    assert_eq!(occurrences, ids.samples().len());
});
