//! Failures of devices, from panics and long reports to one sentence.

use crate::DenseError;

const NO_REASON: &str = "it gave no reason";

/// Starts of the lines that follow a failure's sentence: the place of the failure and the kernel's
/// source.
const DETAILS: [&str; 4] = ["Backtrace", "No backtrace", "Asked at:", "[Source]"];

/// Runs work that involves a device. Drivers and the compiler of kernels report some failures by a
/// panic, which this function turns into an error.
pub(crate) fn guarded<T>(
    device: &str,
    during: &str,
    work: impl FnOnce() -> Result<T, String>,
) -> Result<T, DenseError> {
    let failed = |reason: String| DenseError::Device {
        device: device.to_owned(),
        during: during.to_owned(),
        reason: Some(root_cause(&reason)).filter(|root| !root.is_empty()).unwrap_or_else(|| NO_REASON.to_owned()),
    };
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(failed),
        Err(panic) => {
            let reason = panic.downcast_ref::<String>().cloned();
            let reason = reason.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(failed(reason.unwrap_or_default()))
        }
    }
}

/// The last cause with a text, in at most four lines.
fn root_cause(reason: &str) -> String {
    let lines: Vec<&str> = reason.lines().map(str::trim).collect();
    let text = |cause: &[&str]| -> Vec<String> {
        let lines = cause.iter().take_while(|line| !DETAILS.iter().any(|details| line.starts_with(details)));
        lines.filter(|line| !line.is_empty()).take(4).map(|line| (*line).to_owned()).collect()
    };
    let mut causes = lines.split(|line| line.starts_with("Caused by:")).map(text);
    let root = causes.rfind(|cause| !cause.is_empty()).unwrap_or_default();
    root.join(": ").replace("::", ":")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts in CubeCL's form.
    #[test]
    fn a_failure_is_reduced_to_its_root_cause() {
        let memory = "An error happened during execution\nCaused by:\n  Several failures at once\nCaused by:\n  The bytes were never written \
            (failure #3)\n  Asked at: x.rs:1\n  skipped\n\nCaused by:\n  An IO error happened\nCaused by:\n  out of device memory allocating \
            4096 bytes\n  No backtrace available";
        assert_eq!(root_cause(memory), "out of device memory allocating 4096 bytes");
        let poisoned = "The device is poisoned\nCaused by:\n  The device is poisoned\nCaused by:\n";
        assert_eq!(root_cause(poisoned), "The device is poisoned");
        let kernel = "Caused by:\n  error: identifier \"x\" is undefined\n  1 error\n[Source]\n__global__ void k() {}";
        assert_eq!(root_cause(kernel), "error: identifier \"x\" is undefined: 1 error");
        assert_eq!(root_cause("Backtrace:\n 0: x"), "");
    }

    #[test]
    fn a_panic_of_a_device_is_an_error_that_names_it() {
        let error =
            guarded::<()>("cuda:1", "training step 7", || panic!("CUDA_ERROR_OUT_OF_MEMORY\nBacktrace:\n  0: x"));
        let message = error.unwrap_err().to_string();
        assert!(message.contains("cuda:1") && message.contains("training step 7"), "{message}");
        assert!(message.contains("CUDA_ERROR_OUT_OF_MEMORY") && !message.contains("Backtrace"), "{message}");
    }
}
