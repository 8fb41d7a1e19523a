// Numbers and events in words. No function here touches the document.

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const isKnown = value => value !== null && value !== undefined && Number.isFinite(value);
const count = value => isKnown(value) ? integer.format(value) : "–";
const fixed = (value, digits) => isKnown(value) ? value.toFixed(digits) : "–";
const percent = share => `${(100 * share).toFixed(1)} %`;

/** 1234567 as 1.23 M. */
function compact(value) {
  if (!isKnown(value)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${significant(value / size, 3)} ${unit}`;
  }
  return significant(value, 3);
}

/** The value with this many significant digits, without an exponent where a person expects none. */
function significant(value, digits) {
  if (!isKnown(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(Math.max(digits - 2, 0)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (!isKnown(value)) return "–";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${significant(value / size, 3)} ${unit}`;
  }
  return `${integer.format(value)} bytes`;
}

/** A duration: 85 as 1 min 25 s. */
function duration(seconds) {
  if (!isKnown(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${(1000 * seconds).toPrecision(seconds < 0.01 ? 2 : 3)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ""}`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
}

const clock = at => isKnown(at) ? new Date(1000 * at).toLocaleTimeString("en-GB") : "–";
const day = at => isKnown(at) ? new Date(1000 * at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–";

const ROLES = {
  ps: ["ps", "parameter servers", "parameter server"],
  embeddingWorker: ["embedding-worker", "embedding workers", "embedding worker"],
  denseWorker: ["dense-worker", "dense workers", "dense worker"],
  loader: ["loader", "loaders", "loader"],
};
const members = (number, role) => {
  const names = Object.values(ROLES).find(names => names[0] === role) ?? ROLES[role] ?? [role, role, role];
  return `${count(number)} ${number === 1 ? names[2] : names[1]}`;
};

/** The features with test ids that no training row had, the highest share first. */
function unseen(shares) {
  const some = Object.entries(shares ?? {}).filter(([, share]) => share > 0).sort(([, a], [, b]) => b - a);
  if (!some.length) return "";
  const named = some.slice(0, 3).map(([feature, share]) => `${feature} ${percent(share)}`);
  return `; ids unseen in training: ${named.join(", ")}${some.length > 3 ? ", …" : ""}`;
}

const quality = test => [["AUC", test.auc, 4], ["GAUC", test.gauc, 4], ["log loss", test.logLoss, 4], ["NE", test.normalizedEntropy, 4],
  ["calibration", test.calibration, 3]].filter(([, value]) => isKnown(value)).map(([name, value, digits]) => `${name} ${value.toFixed(digits)}`).join(", ");

/** The sentence of each kind of event. Kinds without a sentence are not listed. */
const SENTENCES = {
  started: e => `Training of ${e.model} starts in mode ${e.mode}, with ${count(e.denseParameters)} dense parameters.`,
  modeChosen: e => `Mode ${e.mode} was chosen: ${e.reason}`,
  modeSwitched: e => `The mode changed from ${e.from} to ${e.to}.`,
  scaling: e => e.from === e.to ? `A rebalance of the ${members(e.to, e.role)} was requested.${reason(e)}`
    : `${members(e.to, e.role)} were requested; the job has ${count(e.from)}.${reason(e)}`,
  scaled: e => `The job now has ${members(e.to, e.role)}; it had ${count(e.from)}.`,
  shareChanged: e => e.share < 1 ? `${e.role} ${e.index} takes ${fixed(e.factor, 1)} times as long as the others and gets ${fixed(100 * e.share, 0)} % of an even share of the work.`
    : `${e.role} ${e.index} is no longer slow and gets an even share of the work.`,
  slotsMoved: e => e.slots ? `${count(e.slots)} slots (${bytes(e.bytes)}) moved from ${e.from} to ${members(e.to, "ps")} in ${duration(e.seconds)}. Training paused for ${duration(e.restSeconds)}.`
    : `No slot had to move: the busiest parameter server has ${fixed(e.imbalance, 2)} times the mean load.`,
  resumed: e => `Training resumes from checkpoint ${e.checkpoint} with ${count(e.rows)} rows.`,
  warmStarted: e => `Training begins with the model of ${e.from.path}, step ${e.from.step}: ${count(e.rows)} rows.`
    + (e.newFeatures.length ? ` New features: ${e.newFeatures.join(", ")}.` : "")
    + (e.leftOutFeatures.length ? ` Features left out: ${e.leftOutFeatures.join(", ")}.` : "")
    + (e.replacedOptimizer ? " The state of the dense optimizer starts fresh." : ""),
  checkpointSaved: e => `Checkpoint ${e.checkpoint} was saved: ${count(e.rows)} rows, ${bytes(e.bytes)}, in ${duration(e.seconds)}.`,
  evaluation: e => `Test: ${quality(e.test)} on ${count(e.test.samples)} rows${unseen(e.test.unseen)}.`,
  warning: e => sentence(e.message),
  restarting: e => `Restart ${e.restart} in ${e.seconds} s: ${sentence(e.message)}`,
  leaving: e => `${e.member} got SIGTERM. Its rows move to the others first.`,
  serverKeptRows: e => `${e.member} was killed and restarted. Its rows were still in memory.`,
  coordinatorTakenUp: () => "The coordinator was killed and restarted. It continues from its journal.",
  rejoined: e => `${e.member} was replaced. Its loaders read ${count(e.chunks)} chunks of data again.`,
  summary: e => `Complete: ${count(e.samples)} samples in ${duration(e.seconds)}${e.test ? `. Test: ${quality(e.test)}` : ""}.`,
  failed: e => `Failed: ${sentence(e.message)}`,
  interrupted: e => `Interrupted: ${sentence(e.message)}`,
};
const reason = e => e.reason ? ` Reason: ${sentence(e.reason)}` : "";

/** The text with a capital and a full stop. A field or a file at its start stays as it is. */
function sentence(text) {
  const trimmed = String(text ?? "").trim().replace(/^interrupted; /, "");
  if (!trimmed) return "";
  const capital = /^[a-z]+[ ,]/.test(trimmed) ? trimmed[0].toUpperCase() + trimmed.slice(1) : trimmed;
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}

const KINDS = {
  all: ["all events", () => true],
  results: ["results", kind => ["started", "evaluation", "summary", "failed", "interrupted"].includes(kind)],
  checkpoints: ["checkpoints", kind => ["checkpointSaved", "resumed", "warmStarted"].includes(kind)],
  changes: ["modes and scaling", kind => ["modeChosen", "modeSwitched", "scaling", "scaled", "shareChanged", "slotsMoved", "leaving"].includes(kind)],
  problems: ["problems", kind => ["warning", "restarting", "rejoined", "serverKeptRows", "coordinatorTakenUp", "failed", "interrupted"].includes(kind)],
};
const FATAL = ["failed", "interrupted"];
