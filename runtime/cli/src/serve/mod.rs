//! `rectrain serve`: answers requests with the predictions of a trained model.

pub(crate) mod args;
mod follow;
mod gate;
mod sharded;

use std::sync::Arc;
use std::time::Instant;

use prometheus::Registry;
use rectrain_inference::{
    NextModel, Predict, Publication, ServedModel, Server, ShardedPredictor, Tls, TlsFiles, listen, warm_up,
};
use rectrain_serving::publication::{Base, RowChanges};
use rectrain_serving::{Model, Predictor, PredictorOptions};

use self::args::ServeArgs;
use self::follow::Following;
use self::gate::Gate;
use self::sharded::Sharded;
use crate::failure::{Failure, runtime};
use crate::human::thousands;
use crate::output;
use crate::{signal, trained};

/// The name of a model whose checkpoint has no name of its job.
const UNNAMED: &str = "model";

pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    // Wrong files are found before the model is loaded.
    let tls = args.tls().map(open_tls).transpose()?;
    let (served, server) = if args.rows_from.is_empty() { whole(args)? } else { sharded(args)? };
    let announced = format!("{}: step {}, {} rows", served.name, served.step, thousands(served.rows));
    let path = format!("/v2/models/{}", served.name);
    if let Some(options) = args.recording() {
        server.record(options)?;
    }
    let (server, scheme) = match tls {
        Some(tls) => (server.with_tls(tls), "https"),
        None => (server, "http"),
    };
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
fn warm(args: &ServeArgs, model: &ServedModel, predictor: &mut impl Predict) -> Result<(), Failure> {
    let Some(file) = &args.warm_up else { return Ok(()) };
    let started = Instant::now();
    let done = warm_up(file, args.warm_up_time, model, predictor, &args.limits())?;
    let milliseconds = started.elapsed().as_millis() as u64;
    tracing::info!(requests = done.requests, rows = done.rows, milliseconds, cut = done.was_cut, "warmed up");
    Ok(())
}

/// A server that holds the whole model.
fn whole(args: &ServeArgs) -> Result<(ServedModel, Server), Failure> {
    let following = Following::open(&args.model, &args.options)?;
    let model = match &following {
        Some(following) => Arc::clone(&following.version().model),
        None => Arc::new(trained::load(&args.model, &args.options)?),
    };
    let mut gate = Gate::open(args, &model.description, |options| Predictor::new(Arc::clone(&model), options))?;
    if let Some(gate) = &mut gate {
        // A model that does not change has no publication.
        let base = Base { sequence: 0, digest: String::new() };
        gate.check(first(&model, base)).map_err(Failure::Failed)?;
    }
    let publication = following.as_ref().map(|following| Publication::of(following.version()));
    let served = ServedModel { publication, ..ServedModel::of(&model, name(args, &model)) };
    let mut predictor = Predictor::new(model, options(args))?;
    warm(args, &served, &mut predictor)?;
    let server = Server::new(served.clone(), predictor, args.limits(), Registry::new())?;
    if let Some(following) = following {
        following.start(args.poll(), gate, server.updates())?;
    }
    Ok((served, server))
}

/// A server whose rows are on shards.
fn sharded(args: &ServeArgs) -> Result<(ServedModel, Server), Failure> {
    let registry = Registry::new();
    let sharded = Sharded::open(args, &registry)?;
    let version = sharded.version();
    let cache_rows = args.cache_rows as usize;
    let predictor = |options| ShardedPredictor::new(version, sharded.client.clone(), cache_rows, options);
    let mut gate = Gate::open(args, &version.model.description, predictor)?;
    if let Some(gate) = &mut gate {
        gate.check(first(&version.model, version.base.clone())).map_err(Failure::Failed)?;
    }
    let served = ServedModel {
        rows: sharded.content.iter().map(|group| group.rows).sum(),
        publication: Some(Publication::of_dense(version, &sharded.content)),
        ..ServedModel::of(&version.model, name(args, &version.model))
    };
    let mut predictor = predictor(options(args))?;
    warm(args, &served, &mut predictor)?;
    let server = Server::new(served.clone(), predictor, args.limits(), registry)?;
    sharded.start(args.poll(), gate, server.updates())?;
    Ok((served, server))
}

fn options(args: &ServeArgs) -> PredictorOptions {
    PredictorOptions { threads: args.threads, precision: args.precision }
}

/// The first model, which the predictor of a gate has already.
fn first(model: &Arc<Model>, base: Base) -> NextModel {
    NextModel { model: Arc::clone(model), base, changes: RowChanges::Known(Vec::new()) }
}

fn name(args: &ServeArgs, model: &Model) -> String {
    let named = args.name.clone().or_else(|| model.job.clone());
    named.unwrap_or_else(|| UNNAMED.to_owned())
}
