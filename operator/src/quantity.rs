//! Kubernetes' quantities, as in manifests, pods and the resource metrics API.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The value of a quantity in its unit (bytes, cores): `16Gi`, `1.5G`, `250m`, `1234567n`. `None`
/// for a text that is no quantity, or that is negative.
pub(crate) fn value_of(quantity: &Quantity) -> Option<f64> {
    let text = quantity.0.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let number: f64 = number.parse().ok()?;
    let value = match suffix {
        "n" => number / 1e9,
        "u" => number / 1e6,
        "m" => number / 1e3,
        "" => number,
        "k" => number * 1e3,
        "M" => number * 1e6,
        "G" => number * 1e9,
        "T" => number * 1e12,
        "P" => number * 1e15,
        "E" => number * 1e18,
        "Ki" => number * 1024.0,
        "Mi" => number * 1_048_576.0,
        "Gi" => number * 1_073_741_824.0,
        "Ti" => number * 1_099_511_627_776.0,
        "Pi" => number * 1_125_899_906_842_624.0,
        "Ei" => number * 1_152_921_504_606_846_976.0,
        exponent => {
            let exponent = exponent.strip_prefix(['e', 'E'])?;
            // Digits only, and no word such as `inf`.
            let is_number = exponent.trim_start_matches(['+', '-']).bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| format!("{number}e{exponent}").parse().ok())??
        }
    };
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_with_their_suffix() {
        let known = [
            ("16Gi", 17_179_869_184.0),
            ("1.5G", 1_500_000_000.0),
            ("7", 7.0),
            ("250m", 0.25),
            ("500u", 0.0005),
            ("1500000000n", 1.5),
            ("64e9", 64e9),
            ("1.5E3", 1500.0),
            ("25e-1", 2.5),
            ("2P", 2e15),
            ("1E", 1e18),
            ("1Pi", 1_125_899_906_842_624.0),
            ("2Ei", 2_305_843_009_213_693_952.0),
        ];
        for (text, expected) in known {
            assert_eq!(value_of(&Quantity(text.to_owned())), Some(expected), "{text}");
        }
        for text in ["1e9x", "-1", "a lot", "", ".", "Gi", "1e", "1einf", "1e999", "1Zi"] {
            assert_eq!(value_of(&Quantity(text.to_owned())), None, "{text}");
        }
    }
}
