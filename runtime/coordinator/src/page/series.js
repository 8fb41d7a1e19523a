// The curves of runs: points, axes, smoothing and thinning. No function here touches the document.

/** The columns of a training point. `record.curve` has the same names. */
const COLUMNS = ["at", "step", "samples", "loss", "auc", "samplesPerSecond", "gradientNorm"];

/** A run without points. */
function emptyRun(name) {
  return { name, record: {}, train: Object.fromEntries(COLUMNS.map(column => [column, []])), tests: [], modes: [], events: [], version: 0 };
}

/** Adds a record, whole or the part since the last one, to a run. */
function ingest(run, record) {
  run.record = { ...run.record, ...record, events: undefined, curve: undefined };
  run.version += 1;
  addPoints(run.train, record.curve);
  for (const logged of record.events ?? []) addEvent(run, logged);
  run.startedAt = run.record.startedAt ?? run.events[0]?.at ?? run.train.at[0];
  run.stepsPerEpoch = stepsPerEpoch(run.record);
  return run;
}

function addPoints(train, curve) {
  const length = curve?.step?.length ?? 0;
  if (!length) return;
  if (!train.step.length) {
    // The columns of an ended run are long, and nothing is added to them.
    for (const column of COLUMNS) setColumn(train, column, curve[column]);
    return;
  }
  // A job that restarted from a checkpoint trains some steps again: the later points replace them.
  let keep = train.step.length;
  while (keep > 0 && train.step[keep - 1] > curve.step[0]) keep -= 1;
  for (const column of COLUMNS) {
    const into = train[column];
    into.length = keep;
    for (let place = 0; place < length; place += 1) into.push(curve[column]?.[place] ?? null);
  }
}

/** Sets a column. A column of many points is a text of JSON, which is parsed when it is first needed. */
function setColumn(train, column, values) {
  const set = known => Object.defineProperty(train, column, { value: known, writable: true, configurable: true, enumerable: true });
  if (typeof values === "string") Object.defineProperty(train, column, { get: () => set(JSON.parse(values))[column], configurable: true, enumerable: true });
  // Records of earlier versions lack some columns.
  else set(values ?? new Array(train.step.length).fill(null));
}

function addEvent(run, logged) {
  const { event, at } = logged, kind = event.event;
  if (kind === "progress") return;
  run.events.push(logged);
  if (kind === "started") run.modes.push({ step: run.modes.length ? run.modes.at(-1).step : 0, mode: event.mode });
  if (kind === "modeSwitched") run.modes.push({ step: event.step, mode: event.to });
  if (kind === "evaluation") addTest(run, event.step, at, event.test);
  if (kind === "summary") {
    run.summary = event;
    if (event.test && run.tests.at(-1)?.step !== event.steps) addTest(run, event.steps, at, event.test);
  }
}

function addTest(run, step, at, test) {
  while (run.tests.length && run.tests.at(-1).step >= step) run.tests.pop();
  run.tests.push({ ...test, step, at });
}

function stepsPerEpoch(record) {
  if (record.stepsPerEpoch) return record.stepsPerEpoch;
  const epochs = record.plan?.epochs;
  return epochs && record.totalSteps ? record.totalSteps / epochs : null;
}

/** The axes: the position of a training point, by its place, and of a test. `column` is the column with the positions. */
const AXES = {
  step: { label: "step", column: "step", point: (run, place) => run.train.step[place], test: (run, test) => test.step, words: count },
  samples: { label: "samples", column: "samples", point: (run, place) => run.train.samples[place], test: (run, test) => samplesAt(run, test.step), words: compact },
  epoch: { label: "epoch", point: (run, place) => run.train.step[place] / run.stepsPerEpoch, test: (run, test) => test.step / run.stepsPerEpoch,
    words: value => significant(value, 4), exists: run => Boolean(run.stepsPerEpoch) },
  time: { label: "time since the start", point: (run, place) => run.train.at[place] - run.startedAt, test: (run, test) => test.at - run.startedAt, words: duration },
};

/** The first place whose value is at least `value`. */
function lowerBound(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** `to`, interpolated where `from` is `value`. */
function interpolate(from, to, value) {
  const place = lowerBound(from, value);
  if (!from.length) return null;
  if (place === 0) return from[0] > 0 && value < from[0] ? to[0] * value / from[0] : to[0];
  if (place === from.length) {
    const last = from.length - 1;
    return from[last] > 0 ? to[last] * value / from[last] : to[last];
  }
  const share = (value - from[place - 1]) / (from[place] - from[place - 1] || 1);
  return to[place - 1] + share * (to[place] - to[place - 1]);
}

function samplesAt(run, step) {
  if (run.train.step.length) return interpolate(run.train.step, run.train.samples, step);
  return step * (run.record.plan?.globalBatchRows ?? 1);
}

/** The position of a step on an axis. */
function positionOfStep(run, axis, step) {
  if (axis === "time") {
    const { step: steps, at } = run.train;
    if (!steps.length || step <= steps[0]) return 0;
    return step >= steps.at(-1) ? at.at(-1) - run.startedAt : interpolate(steps, at, step) - run.startedAt;
  }
  return AXES[axis].test(run, { step });
}

/** An exponential moving average that starts without a bias, as TensorBoard's. */
function smooth(values, weight) {
  if (!weight) return values;
  const smoothed = new Array(values.length);
  let sum = 0, total = 0;
  for (let place = 0; place < values.length; place += 1) {
    const value = values[place];
    if (value === null) {
      smoothed[place] = null;
      continue;
    }
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    smoothed[place] = sum / total;
  }
  return smoothed;
}

/**
 * The points between `low` and `high`: all of them, or the smallest and the largest of each of `buckets` parts.
 * One point beyond either end is kept, so that curves reach the edge.
 */
function thin(xs, ys, low, high, buckets) {
  const first = Math.max(lowerBound(xs, low) - 1, 0), last = Math.min(lowerBound(xs, high) + 1, xs.length);
  const size = (last - first) / buckets;
  if (size <= 2) return known(xs, ys, first, last);
  const thinned = [[], []];
  for (let bucket = 0; bucket < buckets; bucket += 1) {
    const end = Math.min(Math.floor(first + (bucket + 1) * size), last);
    let least = -1, most = -1;
    for (let place = Math.floor(first + bucket * size); place < end; place += 1) {
      const value = ys[place];
      if (value === null) continue;
      if (least < 0 || value < ys[least]) least = place;
      if (most < 0 || value > ys[most]) most = place;
    }
    for (const place of least < most ? [least, most] : [most, least]) push(thinned, xs, ys, place);
  }
  return thinned;
}

function known(xs, ys, first, last) {
  const points = [[], []];
  for (let place = first; place < last; place += 1) if (ys[place] !== null) push(points, xs, ys, place);
  return points;
}

function push(points, xs, ys, place) {
  // x must rise. Two reports may have one step.
  if (place < 0 || xs[place] === null || points[0].at(-1) >= xs[place]) return;
  points[0].push(xs[place]);
  points[1].push(ys[place]);
}

/** What the charts show. `best` chooses the best test value. */
const METRICS = [
  { key: "loss", title: "Loss", unit: "log loss, nats per sample", train: "loss", test: "logLoss", best: "least", log: true, digits: 4,
    about: { train: "Mean loss of the training samples since the last report. Each sample was predicted before it was trained.", test: "Log loss of the test rows." } },
  { key: "auc", title: "AUC", unit: "area under the ROC curve", train: "auc", test: "auc", best: "most", digits: 4,
    about: { train: "AUC of the latest training predictions. Each was made before its sample was trained.", test: "AUC of the test rows." } },
  { key: "ne", title: "Normalized entropy", unit: "1 is as good as always predicting the mean", test: "normalizedEntropy", best: "least", log: true, digits: 4, line: 1 },
  { key: "gauc", title: "GAUC", unit: "AUC within groups, weighted by rows", test: "gauc", best: "most", digits: 4, absent: "GAUC (the manifest names no group column)" },
  { key: "calibration", title: "Calibration", unit: "mean prediction over mean label; 1 is calibrated", test: "calibration", best: "nearest 1", digits: 3, line: 1 },
  { key: "rate", title: "Throughput", unit: "samples per second", train: "samplesPerSecond", fromZero: true, words: count, tick: compact },
  { key: "gradient", title: "Gradient norm", unit: "L2 norm of the dense gradients, before the optimizer", train: "gradientNorm", log: true, words: value => significant(value, 4),
    absent: "gradient norm (no report has one)",
    about: { train: "The mean over the dense workers of the norm of each one's last step. A norm that is not finite has no point." } },
];

/** The place of the best test of a metric; -1 without one. */
function bestTest(tests, metric) {
  const cost = { least: value => value, most: value => -value, "nearest 1": value => Math.abs(value - 1) }[metric.best];
  let best = -1;
  tests.forEach((test, place) => {
    if (isKnown(test[metric.test]) && (best < 0 || cost(test[metric.test]) < cost(tests[best][metric.test]))) best = place;
  });
  return best;
}

const LOSS = METRICS[0];
const AUC = METRICS[1];

/** Whether the test loss has clearly risen since its minimum, and where that was. */
function overfit(run) {
  const best = bestTest(run.tests, LOSS), last = run.tests.at(-1);
  if (best < 0 || best === run.tests.length - 1) return null;
  const least = run.tests[best].logLoss;
  return last.logLoss > 1.01 * least ? { best: run.tests[best], last } : null;
}
