//! The messages of the Open Inference Protocol v2 as JSON. Pure functions: bytes of a request →
//! columns, probabilities → bytes of a response.
//!
//! Tensors are columns. Their datatypes are `BYTES` (texts), `INT64`, `FP32` and `FP64`, and `null`
//! is a missing value. The shape is `[rows]`, or `[rows, n]` for lists of n values. The data may be
//! flat or nested.

use std::fmt;

use rectrain_data::{Column, DataError, Place, Schema, Values};
use serde::de::{DeserializeSeed, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::refusal::Refusal;
use crate::version::{Publication, Version};

/// The output of a model.
pub(crate) const OUTPUT: &str = "probability";
/// The platform of models, and the name of the server.
pub(crate) const PLATFORM: &str = "rectrain";
/// The request, in messages.
pub(crate) const REQUEST: &str = "the request";
/// The datatypes of inputs, for messages.
const DATATYPES: &str = "BYTES, INT64, FP32 or FP64";

/// A request for predictions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InferRequest {
    /// The client's name for the request. The response repeats it.
    pub(crate) id: Option<String>,
    /// The inputs.
    pub(crate) columns: Vec<Column>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    id: Option<String>,
    inputs: Vec<Tensor>,
    #[serde(default)]
    outputs: Vec<RequestedOutput>,
    #[serde(rename = "parameters")]
    _parameters: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    datatype: String,
    data: Data,
    #[serde(rename = "parameters")]
    _parameters: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestedOutput {
    name: String,
    #[serde(rename = "parameters")]
    _parameters: Option<IgnoredAny>,
}

/// A value of a tensor.
#[derive(Debug, Clone, PartialEq)]
enum Scalar {
    Null,
    Truth(bool),
    Integer(i64),
    /// An integer above the 64-bit signed ones.
    Unsigned(u64),
    Float(f64),
    Text(String),
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Truth(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Unsigned(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Text(value) => value.chars().take(80).collect::<String>().fmt(f),
        }
    }
}

/// The values of a tensor, flattened.
struct Data(Vec<Scalar>);

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut values = Vec::new();
        deserializer.deserialize_seq(Flatten(&mut values))?;
        Ok(Self(values))
    }
}

/// Appends values, and the values of nested arrays.
struct Flatten<'a>(&'a mut Vec<Scalar>);

impl Flatten<'_> {
    fn push(self, value: Scalar) {
        self.0.push(value);
    }
}

impl<'de> DeserializeSeed<'de> for Flatten<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Flatten<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("numbers, texts, nulls, or arrays of these")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.push(Scalar::Null);
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.push(Scalar::Truth(value));
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.push(Scalar::Integer(value));
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.push(i64::try_from(value).map_or(Scalar::Unsigned(value), Scalar::Integer));
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.push(Scalar::Float(value));
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        self.push(Scalar::Text(value.to_owned()));
        Ok(())
    }

    fn visit_string<E>(self, value: String) -> Result<(), E> {
        self.push(Scalar::Text(value));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values.next_element_seed(Flatten(&mut *self.0))?.is_some() {}
        Ok(())
    }
}

/// Reads the body of a request of at most `max_rows` rows.
pub(crate) fn read_request(body: &[u8], max_rows: usize) -> Result<InferRequest, Refusal> {
    let message: Message = serde_json::from_slice(body)
        .map_err(|error| Refusal::Bad(format!("{REQUEST} is no inference request of JSON: {error}")))?;
    message.outputs.iter().try_for_each(|output| check_output(&output.name))?;
    let columns = message.inputs.into_iter().map(|tensor| read_tensor(tensor, max_rows));
    Ok(InferRequest { id: message.id, columns: columns.collect::<Result<_, _>>()? })
}

fn read_tensor(tensor: Tensor, max_rows: usize) -> Result<Column, Refusal> {
    let Tensor { name, shape, datatype, data: Data(data), .. } = tensor;
    let (rows, list) = read_shape(&name, &shape, data.len(), max_rows)?;
    let place = ColumnPlace { name: &name, width: list.unwrap_or(1).max(1), datatype: &datatype };
    let values = read_values(&place, data)?;
    Ok(Column { name, rows, list, values })
}

/// The rows and the values a row of a tensor with `found` values.
pub(crate) fn read_shape(
    name: &str,
    shape: &[u64],
    found: usize,
    max_rows: usize,
) -> Result<(usize, Option<usize>), Refusal> {
    let (rows, list) = match *shape {
        [rows] => (rows, None),
        [rows, width] => (rows, Some(width)),
        _ => {
            return Err(Refusal::Bad(format!(
                "{REQUEST}: column `{name}` has the shape {shape:?}; expected [rows], or [rows, n] for n values a row"
            )));
        }
    };
    if rows > max_rows as u64 {
        let problem = format!("{REQUEST}: column `{name}` has {rows} rows, and a request may have {max_rows}");
        return Err(Refusal::TooLarge(problem));
    }
    if rows.checked_mul(list.unwrap_or(1)) != Some(found as u64) {
        let problem = format!("{REQUEST}: column `{name}` has {found} values, and its shape {shape:?} another number");
        return Err(Refusal::Bad(problem));
    }
    // Both are at most the number of values or of rows, or the width of no rows.
    Ok((rows as usize, list.map(|width| width as usize)))
}

/// Refuses an output that no model has.
pub(crate) fn check_output(name: &str) -> Result<(), Refusal> {
    if name == OUTPUT {
        return Ok(());
    }
    Err(Refusal::Bad(format!("the model has no output `{name}`; its output is `{OUTPUT}`")))
}

pub(crate) fn unknown_datatype(name: &str, datatype: &str) -> Refusal {
    Refusal::Bad(format!("{REQUEST}: column `{name}` has the datatype `{datatype}`; expected {DATATYPES}"))
}

/// The names and the usual datatypes of the inputs of a model.
pub(crate) fn inputs_of(schema: &Schema) -> impl Iterator<Item = (&str, &'static str)> {
    let sparse = schema.sparse.iter().map(|field| (field.name.as_str(), "BYTES"));
    sparse.chain(schema.dense.iter().map(|field| (field.name.as_str(), "FP32")))
}

/// A column, for messages about its values.
struct ColumnPlace<'a> {
    name: &'a str,
    /// Values a row.
    width: usize,
    datatype: &'a str,
}

impl ColumnPlace<'_> {
    fn values<T>(
        &self,
        data: Vec<Scalar>,
        expected: &str,
        read: impl Fn(Scalar) -> Result<T, Scalar>,
    ) -> Result<Vec<Option<T>>, Refusal> {
        let value = |(place, scalar)| match scalar {
            Scalar::Null => Ok(None),
            scalar => read(scalar).map(Some).map_err(|found| self.fault(place, &found, expected)),
        };
        data.into_iter().enumerate().map(value).collect()
    }

    fn fault(&self, place: usize, found: &Scalar, expected: &str) -> Refusal {
        let error = DataError::BadRow {
            file: REQUEST.to_owned(),
            at: Place::Row((place / self.width) as u64 + 1),
            column: self.name.to_owned(),
            value: found.to_string(),
            expected: format!("{expected}, because its datatype is {}", self.datatype),
        };
        Refusal::Bad(error.to_string())
    }
}

fn read_values(place: &ColumnPlace<'_>, data: Vec<Scalar>) -> Result<Values, Refusal> {
    Ok(match place.datatype {
        "BYTES" => Values::Texts(place.values(data, "a text", |scalar| match scalar {
            Scalar::Text(text) => Ok(text.into_bytes()),
            other => Err(other),
        })?),
        "INT64" => Values::Integers(place.values(data, "a 64-bit integer", |scalar| match scalar {
            Scalar::Integer(value) => Ok(value),
            other => Err(other),
        })?),
        "FP32" => Values::Singles(place.values(data, "a number", |scalar| number(scalar).map(|value| value as f32))?),
        "FP64" => Values::Doubles(place.values(data, "a number", number)?),
        other => return Err(unknown_datatype(place.name, other)),
    })
}

fn number(scalar: Scalar) -> Result<f64, Scalar> {
    match scalar {
        Scalar::Integer(value) => Ok(value as f64),
        Scalar::Unsigned(value) => Ok(value as f64),
        Scalar::Float(value) => Ok(value),
        other => Err(other),
    }
}

#[derive(Serialize)]
struct WrittenRequest<'a> {
    inputs: Vec<WrittenTensor<'a>>,
}

#[derive(Serialize)]
struct WrittenTensor<'a> {
    name: &'a str,
    shape: Vec<usize>,
    datatype: &'static str,
    data: WrittenData<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum WrittenData<'a> {
    Texts(Vec<Option<&'a str>>),
    Integers(&'a [Option<i64>]),
    Singles(&'a [Option<f32>]),
    Doubles(&'a [Option<f64>]),
}

/// The body of a request with these columns, on one line. [`read_request`] reads it. `None` if JSON
/// cannot hold a value: a text that is not UTF-8, or an infinite number.
pub(crate) fn write_request(columns: &[Column]) -> Option<Vec<u8>> {
    let inputs = columns.iter().map(written_tensor).collect::<Option<_>>()?;
    serde_json::to_vec(&WrittenRequest { inputs }).ok()
}

fn written_tensor(column: &Column) -> Option<WrittenTensor<'_>> {
    let (datatype, data) = match &column.values {
        Values::Texts(values) => ("BYTES", WrittenData::Texts(values.iter().map(utf_8).collect::<Option<_>>()?)),
        Values::Integers(values) => ("INT64", WrittenData::Integers(values)),
        // JSON writes NaN as null, which is a missing value as well.
        Values::Singles(values) if !values.iter().flatten().any(|value| value.is_infinite()) => {
            ("FP32", WrittenData::Singles(values))
        }
        Values::Doubles(values) if !values.iter().flatten().any(|value| value.is_infinite()) => {
            ("FP64", WrittenData::Doubles(values))
        }
        Values::Singles(_) | Values::Doubles(_) => return None,
    };
    let shape = std::iter::once(column.rows).chain(column.list).collect();
    Some(WrittenTensor { name: &column.name, shape, datatype, data })
}

/// A text that JSON can hold. The outer `None` is another one.
fn utf_8(value: &Option<Vec<u8>>) -> Option<Option<&str>> {
    value.as_deref().map(std::str::from_utf8).transpose().ok()
}

/// The response to a request.
#[derive(Debug, Serialize)]
pub(crate) struct InferResponse<'a> {
    pub(crate) model_name: &'a str,
    pub(crate) model_version: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    pub(crate) outputs: [OutputTensor; 1],
}

/// The probabilities of the rows.
#[derive(Debug, Serialize)]
pub(crate) struct OutputTensor {
    name: &'static str,
    shape: [usize; 1],
    datatype: &'static str,
    data: Vec<f32>,
}

impl OutputTensor {
    pub(crate) fn new(data: Vec<f32>) -> Self {
        Self { name: OUTPUT, shape: [data.len()], datatype: "FP32", data }
    }
}

/// The description of a model.
#[derive(Debug, Serialize)]
pub(crate) struct ModelMetadata<'a> {
    name: &'a str,
    versions: [&'a str; 1],
    platform: &'static str,
    inputs: Vec<TensorMetadata<'a>>,
    outputs: [TensorMetadata<'a>; 1],
    /// Of a model that is published while it is trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    properties: Option<Properties<'a>>,
}

/// The publication of the model. The values are texts, as the protocol's parameters of a model.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Properties<'a> {
    sequence: String,
    content_digest: &'a str,
    /// Milliseconds since 1970.
    published_at: String,
}

impl<'a> Properties<'a> {
    fn of(publication: &'a Publication) -> Self {
        Self {
            sequence: publication.sequence.to_string(),
            content_digest: &publication.content_digest,
            published_at: publication.published_at.to_string(),
        }
    }
}

#[derive(Debug, Serialize)]
struct TensorMetadata<'a> {
    name: &'a str,
    datatype: &'static str,
    /// -1 is any number of rows.
    shape: [i64; 1],
}

impl<'a> ModelMetadata<'a> {
    pub(crate) fn new(name: &'a str, version: &'a Version, schema: &'a Schema) -> Self {
        let tensor = |(name, datatype)| TensorMetadata { name, datatype, shape: [-1] };
        Self {
            name,
            versions: [&version.name],
            platform: PLATFORM,
            inputs: inputs_of(schema).map(tensor).collect(),
            outputs: [tensor((OUTPUT, "FP32"))],
            properties: version.publication.as_ref().map(Properties::of),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tensor(name: &str, datatype: &str, shape: &serde_json::Value, data: &serde_json::Value) -> serde_json::Value {
        json!({ "name": name, "datatype": datatype, "shape": shape, "data": data })
    }

    fn read(request: &serde_json::Value) -> Result<InferRequest, Refusal> {
        read_request(request.to_string().as_bytes(), 10)
    }

    fn column(datatype: &str, shape: serde_json::Value, data: serde_json::Value) -> Result<Column, Refusal> {
        let request = json!({ "inputs": [tensor("c", datatype, &shape, &data)] });
        Ok(read(&request)?.columns.remove(0))
    }

    fn message(datatype: &str, shape: serde_json::Value, data: serde_json::Value) -> String {
        let refusal = column(datatype, shape, data).unwrap_err();
        assert_eq!(refusal.status().as_u16(), 400);
        refusal.to_string()
    }

    #[test]
    fn tensors_are_columns() {
        let texts = column("BYTES", json!([3]), json!(["a", null, ""])).unwrap();
        let values = vec![Some(b"a".to_vec()), None, Some(vec![])];
        assert_eq!(texts, Column { name: "c".into(), rows: 3, list: None, values: Values::Texts(values) });
        let integers = column("INT64", json!([2, 2]), json!([[1, i64::MIN], [null, i64::MAX]])).unwrap();
        let values = vec![Some(1), Some(i64::MIN), None, Some(i64::MAX)];
        assert_eq!(integers, Column { name: "c".into(), rows: 2, list: Some(2), values: Values::Integers(values) });
        let singles = column("FP32", json!([3]), json!([1, 0.1, null])).unwrap();
        assert_eq!(singles.values, Values::Singles(vec![Some(1.0), Some(0.1), None]));
        let doubles = column("FP64", json!([1]), json!([0.1])).unwrap();
        assert_eq!(doubles.values, Values::Doubles(vec![Some(0.1)]));
        let none = column("INT64", json!([4, 0]), json!([])).unwrap();
        assert_eq!((none.rows, none.list), (4, Some(0)));
    }

    #[test]
    fn the_optional_parts_of_a_request_are_known() {
        let request = json!({
            "id": "7", "parameters": {"a": [1]}, "outputs": [{"name": "probability", "parameters": {}}],
            "inputs": [{"name": "c", "shape": [1], "data": [1], "datatype": "INT64", "parameters": {"b": 2}}],
        });
        let found = read(&request).unwrap();
        assert_eq!((found.id.as_deref(), found.columns.len()), (Some("7"), 1));
        let other = read(&json!({ "inputs": [], "outputs": [{"name": "score"}] })).unwrap_err();
        assert_eq!(other.to_string(), "the model has no output `score`; its output is `probability`");
        let misspelt = read(&json!({ "input": [] })).unwrap_err().to_string();
        assert!(misspelt.contains("unknown field `input`"), "{misspelt}");
        let text = read_request(b"hello", 10).unwrap_err().to_string();
        assert!(text.starts_with("the request is no inference request of JSON"), "{text}");
    }

    #[test]
    fn bad_tensors_are_refused_by_column_and_row() {
        assert_eq!(
            message("FP32", json!([3]), json!([1, "x", 2])),
            "the request, row 2, column `c`: found \"x\", expected a number, because its datatype is FP32"
        );
        assert_eq!(
            message("INT64", json!([2, 2]), json!([1, 2, 3, 0.5])),
            "the request, row 2, column `c`: found \"0.5\", expected a 64-bit integer, because its datatype is INT64"
        );
        let text = message("BYTES", json!([1]), json!([5]));
        assert!(text.contains("row 1, column `c`: found \"5\", expected a text"), "{text}");
        let large = message("INT64", json!([1]), json!([u64::MAX]));
        assert!(large.contains("found \"18446744073709551615\", expected a 64-bit integer"), "{large}");
        let truth = message("FP64", json!([1]), json!([true]));
        assert!(truth.contains("found \"true\", expected a number"), "{truth}");
        assert_eq!(
            message("INT32", json!([1]), json!([5])),
            "the request: column `c` has the datatype `INT32`; expected BYTES, INT64, FP32 or FP64"
        );
        assert_eq!(
            message("INT64", json!([3]), json!([5])),
            "the request: column `c` has 1 values, and its shape [3] another number"
        );
        for shape in [json!([]), json!([1, 1, 1])] {
            let text = message("INT64", shape, json!([5]));
            assert!(text.contains("expected [rows], or [rows, n]"), "{text}");
        }
        let object = message("INT64", json!([1]), json!([{}]));
        assert!(object.contains("expected numbers, texts, nulls, or arrays of these"), "{object}");
    }

    #[test]
    fn too_many_rows_are_refused_even_without_values() {
        for shape in [json!([11]), json!([u64::MAX, 0]), json!([1_u64 << 40, 1_u64 << 40])] {
            let refusal = column("INT64", shape, json!([])).unwrap_err();
            assert_eq!(refusal.status().as_u16(), 413);
            assert!(refusal.to_string().contains("a request may have 10"), "{refusal}");
        }
    }

    #[test]
    fn a_written_request_is_read_as_the_same_columns() {
        let column = |name: &str, list, values| Column { name: name.into(), rows: 2, list, values };
        let columns = [
            column("a", None, Values::Texts(vec![Some("\"\n|é".into()), None])),
            column("b", Some(2), Values::Integers(vec![Some(i64::MIN), None, Some(3), Some(i64::MAX)])),
            column("c", Some(0), Values::Integers(vec![])),
            column("d", None, Values::Singles(vec![Some(0.1), None])),
            column("e", None, Values::Doubles(vec![Some(1e300), Some(-0.5)])),
        ];
        let line = write_request(&columns).unwrap();
        assert!(!line.contains(&b'\n'), "a request is one line");
        assert_eq!(read_request(&line, 10).unwrap().columns, columns);
        let missing = write_request(&[column("d", None, Values::Singles(vec![Some(f32::NAN), Some(2.0)]))]).unwrap();
        assert_eq!(read_request(&missing, 10).unwrap().columns[0].values, Values::Singles(vec![None, Some(2.0)]));
        for unwritable in [Values::Texts(vec![Some(vec![255])]), Values::Doubles(vec![Some(f64::INFINITY)])] {
            assert_eq!(write_request(&[column("a", None, unwritable)]), None);
        }
    }

    #[test]
    fn responses_repeat_the_id_of_their_request() {
        let response = |id: Option<&str>| InferResponse {
            model_name: "m",
            model_version: "7",
            id: id.map(str::to_owned),
            outputs: [OutputTensor::new(vec![0.5, 0.1])],
        };
        let outputs = json!([{"name": "probability", "shape": [2], "datatype": "FP32", "data": [0.5, 0.1_f32]}]);
        let expected = json!({"model_name": "m", "model_version": "7", "id": "x", "outputs": outputs});
        assert_eq!(json!(response(Some("x"))), expected);
        assert!(json!(response(None)).get("id").is_none());
    }
}
