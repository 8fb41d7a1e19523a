//! `rectrain serving-ps`: holds a shard of the rows of a published model, for inference servers.

pub(crate) mod args;

use rectrain_serving_ps::{Options, RowsServer, RowsServerError};

use self::args::ServingPsArgs;
use crate::checkpoint::store_options;
use crate::failure::{Failure, runtime};
use crate::output;
use crate::serve::args::default_poll;
use crate::signal;

pub(crate) fn run(args: &ServingPsArgs) -> Result<(), Failure> {
    let ServingPsArgs { shard, shards, .. } = *args;
    if shard >= shards {
        return Err(Failure::User(format!(
            "--shard is {shard}, and --shards {shards} has the shards 0 to {}",
            shards - 1
        )));
    }
    let options = Options {
        path: args.path.clone(),
        storage: store_options(&args.options)?,
        shard,
        shards,
        versions: usize::from(args.versions),
        poll: args.poll.unwrap_or(default_poll(&args.path)),
        drain: args.drain,
    };
    runtime()?.block_on(async {
        let interrupted = signal::interrupted();
        let server = RowsServer::listen(options, args.listen, args.http).await;
        let server = server.map_err(|error| {
            let is_rows = matches!(&error, RowsServerError::Listen { address, .. } if *address == args.listen);
            Failure::cannot_listen(error, if is_rows { "--listen" } else { "--http" })
        })?;
        let [rows, http] = server.addresses()?;
        output::line(format!("shard {shard} of {shards}: look-ups at {rows}, health at http://{http}"))?;
        Ok(server.serve(interrupted).await?)
    })
}
