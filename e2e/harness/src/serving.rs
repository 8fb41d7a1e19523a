//! A job that publishes its model, and inference servers that follow it, as processes of this
//! machine.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::command::{Running, command};
use crate::events::{integer, missing, parse};
use crate::waiting::eventually;
use crate::workspace::built;
use crate::{HarnessError, files, http, not_yet, rectrain};

/// The manifest of a job over synthetic rows. A trial makes it outlast itself.
pub const MANIFEST: &str = "docs/examples/synthetic.yaml";
const ENDLESS: [&str; 2] = ["spec.data.synthetic.rows=100000000000", "spec.data.synthetic.testRows=1000"];
/// The time limit for the first publication of a job, which is a full model.
const FIRST: Duration = Duration::from_secs(300);
/// The time limit for a server to reach a published model.
const CATCH_UP: Duration = Duration::from_secs(30);
/// The smallest ids are the most frequent ones. Requests have these.
const IDS: u64 = 50;

/// A job that trains and publishes until this value is dropped.
#[derive(Debug)]
pub struct PublishingJob {
    run: Running,
    /// The address of its page.
    page: SocketAddr,
    published: PathBuf,
}

impl PublishingJob {
    /// Starts a job of `rectrain run`, with its checkpoints and publications in `folder`, and waits
    /// for the first publication. It publishes every `every_seconds`, and a full model after at
    /// least 30 s. The rows of [`MANIFEST`] do not end. `sets` override all settings.
    ///
    /// # Errors
    /// A job that does not start, or that publishes nothing in time.
    pub fn start(manifest: &str, sets: &[String], every_seconds: f64, folder: &Path) -> Result<Self, HarnessError> {
        let (page, published) = (http::free_address()?, folder.join("published"));
        let own = [
            format!("spec.checkpoint.path={}", folder.join("checkpoints").display()),
            format!("spec.checkpoint.fullEvery={}", full_every(every_seconds)),
            format!("spec.serving.publish.path={}", published.display()),
            format!("spec.serving.publish.everySeconds={every_seconds}"),
        ];
        let endless = ENDLESS.iter().filter(|_| manifest == MANIFEST).map(ToString::to_string);
        let endless: Vec<String> = endless.collect();
        let mut run = rectrain::job(manifest, endless.iter().chain(&own).chain(sets))?;
        run.args(["--metrics", &page.to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
        run.stderr(files::log_file(&folder.join("job.log"))?);
        let job = Self { run: Running::start(&mut run)?, page, published };
        eventually(FIRST, "the first published model", || job.latest_step())?;
        Ok(job)
    }

    /// The path of the published models.
    #[must_use]
    pub fn published(&self) -> &Path {
        &self.published
    }

    /// The id of its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.run.0.id()
    }

    /// The global steps that the job has completed.
    ///
    /// # Errors
    /// The job does not answer.
    pub fn step(&self) -> Result<u64, HarnessError> {
        // Without old events and points of curves.
        let page = http::get(self.page, &format!("/job.json?after={0}&points={0}", u32::MAX))?;
        integer("the job's page", &parse("the job's page", &page)?, "step")
    }

    /// The global step of the newest published model.
    ///
    /// # Errors
    /// Nothing is published yet.
    pub fn latest_step(&self) -> Result<u64, HarnessError> {
        let latest = files::read(&self.published.join("latest.json"))?;
        integer("latest.json", &parse("latest.json", &latest)?, "step")
    }

    /// The sequence number of the newest published model.
    ///
    /// # Errors
    /// Nothing is published yet.
    pub fn latest_sequence(&self) -> Result<u64, HarnessError> {
        let latest = parse("latest.json", &files::read(&self.published.join("latest.json"))?)?;
        integer("latest.json", &latest["model"], "sequence")
    }

    /// The checkpoint with the newest published model.
    ///
    /// # Errors
    /// Nothing is published yet.
    pub fn latest_checkpoint(&self) -> Result<PathBuf, HarnessError> {
        let latest = parse("latest.json", &files::read(&self.published.join("latest.json"))?)?;
        let name = latest["checkpoint"].as_str().ok_or_else(|| missing("latest.json", &latest, "checkpoint"))?;
        Ok(self.published.with_file_name("checkpoints").join(name))
    }

    /// Ends the job. It publishes nothing afterwards.
    ///
    /// # Errors
    /// [`HarnessError::Io`].
    pub fn end(&mut self) -> Result<(), HarnessError> {
        // On SIGINT the run ends its threads, and saves nothing.
        let signalled = Command::new("kill").args(["-INT", &self.run.0.id().to_string()]).status();
        signalled.and_then(|_| self.run.0.wait()).map(drop).map_err(HarnessError::io("end", "the job"))
    }
}

/// The number of checkpoints from a full one to the next, for one every 30 s. It is at least 30, so
/// that servers mostly take deltas, and at most as many as a manifest may ask for.
fn full_every(every_seconds: f64) -> u32 {
    (30.0 / every_seconds).ceil().clamp(30.0, 1000.0) as u32
}

/// The address of a model that a server answers for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    address: SocketAddr,
    /// The path of the model, such as `/v2/models/clicks`.
    path: String,
}

/// The answer to a request for predictions.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The global step of the model that answered.
    pub version: u64,
    /// The probability of each row.
    pub probabilities: Vec<f64>,
}

impl Endpoint {
    /// The endpoint in the line that `rectrain serve` prints.
    fn of_line(line: &str) -> Option<Self> {
        let (address, path) = line.trim().split_once("http://")?.1.split_once('/')?;
        Some(Self { address: address.parse().ok()?, path: format!("/{path}") })
    }

    /// A request for predictions of this many rows. Its ids are frequent ones, and another `salt`
    /// has others.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn request(&self, rows: u64, salt: u64) -> Result<String, HarnessError> {
        let metadata = parse("the model's metadata", &http::get(self.address, &self.path)?)?;
        let inputs = metadata["inputs"].as_array().ok_or_else(|| missing("the model", &metadata, "inputs"))?;
        Ok(json!({ "inputs": inputs.iter().map(|input| tensor(input, rows, salt)).collect::<Vec<_>>() }).to_string())
    }

    /// Sends a request for predictions.
    ///
    /// # Errors
    /// The server does not answer, or refuses the request.
    pub fn infer(&self, request: &str) -> Result<Answer, HarnessError> {
        let response = http::post(self.address, &format!("{}/infer", self.path), request)?;
        if response.status != 200 {
            return Err(not_yet(format!("status {}: {}", response.status, response.body)));
        }
        answer(&parse("the answer", &response.body)?)
    }

    /// Waits until an answer is of this global step or a later one.
    ///
    /// # Errors
    /// [`HarnessError::TimedOut`].
    pub fn until_version(&self, version: u64) -> Result<(), HarnessError> {
        eventually(CATCH_UP, &format!("a server with the model of step {version}"), || {
            let found = self.infer(&self.request(1, 0)?)?.version;
            if found >= version { Ok(()) } else { Err(not_yet(format!("it answers with step {found}"))) }
        })
    }
}

fn tensor(input: &Value, rows: u64, salt: u64) -> Value {
    let (datatype, count) = if input["datatype"] == "BYTES" { ("INT64", IDS) } else { ("FP32", 10) };
    let data: Vec<u64> = (0..rows).map(|row| (7 * row + salt) % count + 1).collect();
    json!({ "name": input["name"], "shape": [rows], "datatype": datatype, "data": data })
}

fn answer(response: &Value) -> Result<Answer, HarnessError> {
    let version = response["model_version"].as_str().and_then(|version| version.parse().ok());
    let data = response["outputs"][0]["data"].as_array();
    let probabilities = data.and_then(|data| data.iter().map(Value::as_f64).collect());
    let (version, probabilities) =
        version.zip(probabilities).ok_or_else(|| missing("the answer", response, "model_version and probabilities"))?;
    Ok(Answer { version, probabilities })
}

/// An inference server, which ends with this value.
#[derive(Debug)]
pub struct InferenceServer {
    process: Running,
    /// Its model.
    pub endpoint: Endpoint,
}

impl InferenceServer {
    /// Starts `rectrain serve`, and waits until it answers. Its log goes to the file `log`.
    ///
    /// # Errors
    /// A server that ends before it answers.
    pub fn start(model: &Path, listen: SocketAddr, arguments: &[&str], log: &Path) -> Result<Self, HarnessError> {
        let mut serve = command(built("rectrain")?, ["serve", "--listen", &listen.to_string(), "--name", "model"]);
        serve.args(arguments).arg(model);
        let (process, line) = start_and_read_line(&mut serve, log)?;
        let expected = "the URL of its model";
        let endpoint =
            Endpoint::of_line(&line).ok_or(HarnessError::NoOutput { program: "rectrain serve", expected })?;
        Ok(Self { process, endpoint })
    }

    /// The id of its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process.0.id()
    }

    /// Kills it with SIGKILL.
    ///
    /// # Errors
    /// [`HarnessError::Io`].
    pub fn kill(&mut self) -> Result<(), HarnessError> {
        let killed = self.process.0.kill().and_then(|()| self.process.0.wait());
        killed.map(drop).map_err(HarnessError::io("kill", "an inference server"))
    }
}

/// A replica of a shard of a published model's rows, which ends with this value.
#[derive(Debug)]
pub struct RowsReplica {
    process: Running,
    shard: usize,
    shards: usize,
    /// The addresses of look-ups and of HTTP.
    addresses: [SocketAddr; 2],
    starts: u32,
}

impl RowsReplica {
    /// Starts `rectrain serving-ps` at free addresses. Its log goes to `folder`.
    ///
    /// # Errors
    /// A server that ends before it listens.
    fn start(model: &Path, shard: usize, shards: usize, folder: &Path) -> Result<Self, HarnessError> {
        let addresses = [http::free_address()?, http::free_address()?];
        let log = folder.join(format!("rows-{shard}-{}-1.log", addresses[0].port()));
        let process = rows_process(model, shard, shards, addresses, &log)?;
        Ok(Self { process, shard, shards, addresses, starts: 1 })
    }

    /// Kills it with SIGKILL, and starts it again at its addresses.
    ///
    /// # Errors
    /// A server that ends before it listens.
    pub fn kill_and_start(&mut self, model: &Path, folder: &Path) -> Result<(), HarnessError> {
        let killed = self.process.0.kill().and_then(|()| self.process.0.wait());
        killed.map_err(HarnessError::io("kill", "a prediction parameter server"))?;
        self.starts += 1;
        let log = folder.join(format!("rows-{}-{}-{}.log", self.shard, self.addresses[0].port(), self.starts));
        self.process = rows_process(model, self.shard, self.shards, self.addresses, &log)?;
        Ok(())
    }

    /// The id of its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process.0.id()
    }

    /// Waits until it holds the published model with this sequence number or a later one.
    ///
    /// # Errors
    /// [`HarnessError::TimedOut`].
    pub fn until_sequence(&self, sequence: u64) -> Result<(), HarnessError> {
        let metric = "rectrain_serving_ps_model_sequence";
        eventually(CATCH_UP, &format!("a replica of shard {} with the model {sequence}", self.shard), || {
            let found = http::sum_of(&http::get(self.addresses[1], "/metrics")?, metric).unwrap_or(0.0);
            if found >= sequence as f64 { Ok(()) } else { Err(not_yet(format!("it holds the model {found}"))) }
        })
    }
}

/// Starts a server, and reads the first line of its output, which is empty if it ends before. Its
/// log goes to the file `log`.
fn start_and_read_line(server: &mut Command, log: &Path) -> Result<(Running, String), HarnessError> {
    let mut process = Running::start(server.stdout(Stdio::piped()).stderr(files::log_file(log)?))?;
    let output = process.0.stdout.take();
    let output = output.ok_or(HarnessError::NoPipe { program: "rectrain", stream: "output" })?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line).map_err(HarnessError::io("read", "the output of a server"))?;
    Ok((process, line))
}

fn rows_process(
    model: &Path,
    shard: usize,
    shards: usize,
    [rows, http]: [SocketAddr; 2],
    log: &Path,
) -> Result<Running, HarnessError> {
    let words = [shard.to_string(), shards.to_string(), rows.to_string(), http.to_string()];
    let mut serve = command(built("rectrain")?, ["serving-ps"]);
    for (option, word) in ["--shard", "--shards", "--listen", "--http"].into_iter().zip(&words) {
        serve.args([option, word]);
    }
    serve.arg(model);
    let (process, line) = start_and_read_line(&mut serve, log)?;
    if line.is_empty() {
        return Err(HarnessError::NoOutput { program: "rectrain serving-ps", expected: "its addresses" });
    }
    Ok(process)
}

/// The rows of a published model, on replicas of shards.
#[derive(Debug)]
pub struct Shards {
    /// The replicas of all shards, shard by shard.
    pub replicas: Vec<RowsReplica>,
    /// The addresses of the replicas of each shard, with commas.
    addresses: Vec<String>,
}

impl Shards {
    /// Starts `replicas` replicas of each of `shards` shards. None of either starts none.
    ///
    /// # Errors
    /// A replica that does not start.
    pub fn start(model: &Path, shards: usize, replicas: usize, folder: &Path) -> Result<Self, HarnessError> {
        let mut all = Self { replicas: Vec::new(), addresses: Vec::new() };
        for shard in 0..shards {
            let start = |_| RowsReplica::start(model, shard, shards, folder);
            let own = (0..replicas).map(start).collect::<Result<Vec<_>, _>>()?;
            let addresses: Vec<String> = own.iter().map(|replica| replica.addresses[0].to_string()).collect();
            all.addresses.push(addresses.join(","));
            all.replicas.extend(own);
        }
        Ok(all)
    }

    /// The arguments of an inference server with these shards.
    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        self.addresses.iter().flat_map(|addresses| ["--rows-from", addresses])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_the_url_at_the_end_of_a_servers_line() {
        let line = "model: step 7, 1,000 rows, gRPC at 127.0.0.1:2, at http://127.0.0.1:80/v2/models/model\n";
        let expected = Endpoint { address: "127.0.0.1:80".parse().unwrap(), path: "/v2/models/model".to_owned() };
        assert_eq!(Endpoint::of_line(line), Some(expected));
        assert_eq!(Endpoint::of_line(""), None);
    }

    #[test]
    fn a_server_gets_an_argument_for_each_shard() {
        let addresses = vec!["127.0.0.1:1,127.0.0.1:2".to_owned(), "127.0.0.1:3".to_owned()];
        let shards = Shards { replicas: Vec::new(), addresses };
        let expected = ["--rows-from", "127.0.0.1:1,127.0.0.1:2", "--rows-from", "127.0.0.1:3"];
        assert!(shards.arguments().eq(expected));
    }

    #[test]
    fn full_models_are_published_every_thirty_seconds_at_most() {
        assert_eq!([0.2, 1.0, 2.0, 0.0].map(full_every), [150, 30, 30, 1000]);
    }

    #[test]
    fn an_answer_has_its_version_and_probabilities() {
        let response = |data: Value| json!({ "model_version": "12", "outputs": [{ "data": data }] });
        let expected = Answer { version: 12, probabilities: vec![0.5, 0.25] };
        assert_eq!(answer(&response(json!([0.5, 0.25]))).unwrap(), expected);
        for wrong in [response(json!([0.5, null])), json!({ "error": "no" })] {
            assert!(answer(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ids_of_requests_are_frequent_ones() {
        let input = json!({ "name": "item", "datatype": "BYTES" });
        let tensor = tensor(&input, 3, 45);
        assert_eq!((&tensor["data"], &tensor["datatype"]), (&json!([46, 3, 10]), &json!("INT64")));
    }
}
