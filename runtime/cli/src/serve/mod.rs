//! `rectrain serve`: answers requests with the predictions of a trained model.

pub(crate) mod args;
mod follow;
mod gate;

use std::sync::Arc;
use std::time::Instant;

use prometheus::Registry;
use rectrain_inference::{Publication, ServedModel, Server, Tls, TlsFiles, listen, warm_up};
use rectrain_serving::{Model, Predictor, PredictorOptions};

use self::args::ServeArgs;
use self::follow::Following;
use self::gate::Gate;
use crate::failure::{Failure, runtime};
use crate::human::thousands;
use crate::output;
use crate::{signal, trained};

/// The name of a model whose checkpoint has no name of its job.
const UNNAMED: &str = "model";

pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    // Wrong files are found before the model is loaded.
    let tls = args.tls().map(open_tls).transpose()?;
    let following = Following::open(&args.model, &args.options)?;
    let model = match &following {
        Some(following) => Arc::clone(&following.version().model),
        None => Arc::new(trained::load(&args.model, &args.options)?),
    };
    let mut gate = Gate::open(args, &model)?;
    if let Some(gate) = &mut gate {
        gate.check(&model).map_err(Failure::Failed)?;
    }
    let publication = following.as_ref().map(|following| Publication::of(following.version()));
    let served = ServedModel { publication, ..ServedModel::of(&model, name(args, &model)) };
    let mut predictor = Predictor::new(model, PredictorOptions { threads: args.threads, precision: args.precision })?;
    let announced = format!("{}: step {}, {} rows", served.name, served.step, thousands(served.rows));
    let path = format!("/v2/models/{}", served.name);
    warm(args, &served, &mut predictor)?;
    let server = Server::new(served, predictor, args.limits(), Registry::new())?;
    if let Some(options) = args.recording() {
        server.record(options)?;
    }
    let (server, scheme) = match tls {
        Some(tls) => (server.with_tls(tls), "https"),
        None => (server, "http"),
    };
    if let Some(following) = following {
        following.start(args.poll(), gate, server.updates())?;
    }
    runtime()?.block_on(async {
        let interrupted = signal::interrupted();
        let (listener, bound) = listen(args.listen).await.map_err(|error| Failure::cannot_listen(error, "--listen"))?;
        let (grpc, announced) = match args.grpc {
            Some(address) => {
                let (grpc, bound) = listen(address).await.map_err(|error| Failure::cannot_listen(error, "--grpc"))?;
                (Some(grpc), format!("{announced}, gRPC at {bound}"))
            }
            None => (None, announced),
        };
        output::line(format!("{announced}, at {scheme}://{bound}{path}"))?;
        Ok(server.serve(listener, grpc, interrupted).await?)
    })
}

fn open_tls(files: TlsFiles) -> Result<Tls, Failure> {
    Tls::open(files).map_err(|error| rectrain_inference::InferenceError::from(error).into())
}

/// Predicts the recorded requests of `--warm-up`.
fn warm(args: &ServeArgs, model: &ServedModel, predictor: &mut Predictor) -> Result<(), Failure> {
    let Some(file) = &args.warm_up else { return Ok(()) };
    let started = Instant::now();
    let done = warm_up(file, args.warm_up_time, model, predictor, &args.limits())?;
    let milliseconds = started.elapsed().as_millis() as u64;
    tracing::info!(requests = done.requests, rows = done.rows, milliseconds, cut = done.was_cut, "warmed up");
    Ok(())
}

fn name(args: &ServeArgs, model: &Model) -> String {
    let named = args.name.clone().or_else(|| model.job.clone());
    named.unwrap_or_else(|| UNNAMED.to_owned())
}
