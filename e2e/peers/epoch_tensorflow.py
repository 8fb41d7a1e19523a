"""Trains the DLRM of `epoch.yaml` on the rows of a text file for one epoch, and tests it, with TensorFlow. tf.data reads
and parses the rows ahead. Prints one line of JSON, as `epoch.py` does.

    python epoch_tensorflow.py --peer tensorflow --train train.tsv --test test.tsv

`tensorflow-xla` compiles the dense part with XLA. TensorFlow has no reader for Parquet.
"""

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy
import tensorflow as tf

from epoch_data import BATCH, COUNTS, IDS, area_under_curve
from peers_tensorflow import Dlrm
from work import DENSE, DIM, FEATURES, ROWS


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["tensorflow", "tensorflow-xla"], required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def batches(path):
    """Batches of labels [B, 1], log(1 + x) of the counts [B, 13] and ids [26, B]. A batch of lines is parsed at once."""
    missing = [[0.0]] * (1 + len(COUNTS)) + [tf.constant([0], tf.int64)] * len(IDS)

    def parse(lines):
        columns = tf.io.decode_csv(lines, missing, field_delim="\t")
        counts = tf.stack(columns[1 : 1 + len(COUNTS)], 1)
        return columns[0][:, None], tf.math.log1p(counts), tf.stack(columns[1 + len(COUNTS) :])

    lines = tf.data.TextLineDataset(path).skip(1).batch(BATCH)
    return lines.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(4)


def main():
    args = arguments()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    tf.random.set_seed(1)
    model = Dlrm()
    variables = model.variables()
    tables = [tf.Variable(tf.random.normal([ROWS // FEATURES, DIM], stddev=0.01)) for _ in range(FEATURES)]
    # These optimizers update in place, and only the rows that a batch touches. The least first accumulator that this
    # AdaGrad takes is above 0.
    adam = tf.compat.v1.train.AdamOptimizer(1e-3)
    adagrad = tf.compat.v1.train.AdagradOptimizer(0.05, initial_accumulator_value=1e-10)

    @tf.function(jit_compile=args.peer == "tensorflow-xla", reduce_retracing=True)
    def gradients_of(embeddings, dense, labels):
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(embeddings, dense)))
        return tape.gradient(loss, variables + [embeddings])

    def look_up(ids):
        return tf.concat([tf.gather(table, ids[number]) for number, table in enumerate(tables)], 1)

    shapes = [([None, 1], tf.float32), ([None, DENSE], tf.float32), ([FEATURES, None], tf.int64)]
    signature = [tf.TensorSpec(shape, kind) for shape, kind in shapes]

    @tf.function(input_signature=signature)
    def train(labels, dense, ids):
        *gradients, of_embeddings = gradients_of(look_up(ids), dense, labels)
        adam.apply_gradients(zip(gradients, variables))
        parts = tf.split(of_embeddings, FEATURES, 1)
        sparse = [tf.IndexedSlices(part, ids[number], tables[number].shape) for number, part in enumerate(parts)]
        adagrad.apply_gradients(zip(sparse, tables))

    @tf.function(input_signature=signature[1:])
    def logits_of(dense, ids):
        return model(look_up(ids), dense)[:, 0]

    begin, rows = time.perf_counter(), 0
    for labels, dense, ids in batches(args.train):
        train(labels, dense, ids)
        rows += len(labels)
    # The graph's last step may still be running.
    variables[0].numpy()
    trained = time.perf_counter()
    scores, truth = [], []
    for labels, dense, ids in batches(args.test):
        scores.append(logits_of(dense, ids).numpy())
        truth.append(labels.numpy()[:, 0])
    auc = area_under_curve(numpy.concatenate(scores), numpy.concatenate(truth))
    tested = time.perf_counter()
    figures = {"auc": auc, "rows": rows, "trainSeconds": trained - begin, "testSeconds": tested - trained}
    print(json.dumps({"peer": args.peer, "threads": args.threads, **figures}))


if __name__ == "__main__":
    main()
