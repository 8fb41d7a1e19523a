"""Does the work of `rectrain-bench step` and of `dlrm.yaml` with TensorFlow. Prints one line of JSON with the samples
per second.

    python peers_tensorflow.py --work a --peer tensorflow      towers a, b and dlrm: the dense part alone, Adam
    python peers_tensorflow.py --work job --peer tensorflow    a whole step of the DLRM: 26 embeddings of 16 values,
                                                               2 M rows in all, AdaGrad, no data loading

The peers: `tensorflow` (one graph per step, `tf.gather` with sparse gradients), and `tensorflow-xla` (XLA compiles
the dense part).
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy
import tensorflow as tf

from work import BATCHES, DENSE, DIM, FEATURES, ROWS, TOWERS, arguments, id_batches, measure, report


class Mlp:
    def __init__(self, inputs, sizes, last_relu):
        self.layers, self.last_relu = [], last_relu
        for size in sizes:
            bound = inputs**-0.5
            weights = tf.Variable(tf.random.uniform([inputs, size], -bound, bound))
            self.layers.append((weights, tf.Variable(tf.zeros([size]))))
            inputs = size

    def variables(self):
        return [variable for layer in self.layers for variable in layer]

    def __call__(self, values):
        for number, (weights, bias) in enumerate(self.layers):
            values = tf.nn.bias_add(tf.matmul(values, weights), bias)
            if number + 1 < len(self.layers) or self.last_relu:
                values = tf.nn.relu(values)
        return values


class Dlrm:
    """Naumov et al. 2019: bottom MLP, dot products of all pairs, top MLP."""

    def __init__(self):
        self.bottom = Mlp(DENSE, [512, 256, DIM], True)
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = Mlp(pairs + DIM, [512, 256, 1], False)
        rows, columns = numpy.tril_indices(FEATURES + 1, -1)
        self.triangle = tf.constant(rows * (FEATURES + 1) + columns, tf.int32)

    def variables(self):
        return self.bottom.variables() + self.top.variables()

    def __call__(self, embeddings, dense):
        bottom = self.bottom(dense)
        vectors = tf.concat([bottom[:, None, :], tf.reshape(embeddings, [-1, FEATURES, DIM])], 1)
        dots = tf.matmul(vectors, vectors, transpose_b=True)
        dots = tf.gather(tf.reshape(dots, [-1, (FEATURES + 1) ** 2]), self.triangle, axis=1)
        return self.top(tf.concat([bottom, dots], 1))


class Tower:
    def __init__(self, sizes):
        self.layers = Mlp(FEATURES * DIM + DENSE, sizes + [1], False)

    def variables(self):
        return self.layers.variables()

    def __call__(self, embeddings, dense):
        return self.layers(tf.concat([embeddings, dense], 1))


def main():
    args = arguments(__doc__, ["tensorflow", "tensorflow-xla"])
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    tf.random.set_seed(1)
    batch = args.batch or BATCHES[args.work]
    model = Tower(TOWERS[args.work]) if args.work in TOWERS else Dlrm()
    variables = model.variables()
    # These optimizers update in place, and only the rows that a batch touches.
    adam = tf.compat.v1.train.AdamOptimizer(1e-3)
    dense = tf.random.uniform([batch, DENSE]) - 0.5
    labels = tf.cast(tf.random.uniform([batch, 1]) > 0.5, tf.float32)

    @tf.function(jit_compile=args.peer == "tensorflow-xla")
    def gradients_of(embeddings):
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(embeddings, dense)))
        return tape.gradient(loss, variables + [embeddings])

    if args.work == "job":
        tables = [tf.Variable(tf.random.normal([ROWS // FEATURES, DIM], stddev=0.01)) for _ in range(FEATURES)]
        adagrad = tf.compat.v1.train.AdagradOptimizer(0.05)

        @tf.function
        def train(ids):
            embeddings = tf.concat([tf.gather(table, ids[number]) for number, table in enumerate(tables)], 1)
            *gradients, of_embeddings = gradients_of(embeddings)
            adam.apply_gradients(zip(gradients, variables))
            parts = tf.split(of_embeddings, FEATURES, 1)
            sparse = [tf.IndexedSlices(part, ids[number], tables[number].shape) for number, part in enumerate(parts)]
            adagrad.apply_gradients(zip(sparse, tables))
            return parts[0][0, 0]

        batches = [tf.constant(ids) for ids in id_batches(batch, args.steps)]
        step = lambda count: train(batches[count]).numpy()
    else:
        embeddings = tf.random.uniform([batch, FEATURES * DIM]) - 0.5

        @tf.function
        def train():
            *gradients, of_embeddings = gradients_of(embeddings)
            adam.apply_gradients(zip(gradients, variables))
            return of_embeddings[0, 0]

        step = lambda _: train().numpy()

    report(args, batch, measure(step, batch, args.steps))


if __name__ == "__main__":
    main()
