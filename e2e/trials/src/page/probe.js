// Shows a page in a frame of a given width, uses it as a person would, and notes what it shows.
// The trial appends: `probe(PAGE, { width, height, theme, isLive, acts });`

const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));

/** The page as it is while its job runs: it polls. The stub answers twice and then no more, as a process that has ended. */
function live(page) {
  const mark = /(<script type="application\/json" id="data">)([^]*?)(<\/script>)/;
  const stub = `const record = JSON.parse(document.getElementById("kept").textContent).runs[0];
    let answers = 0;
    window.fetch = async () => {
      answers += 1;
      if (answers > 2) throw new TypeError("Failed to fetch");
      return { ok: true, json: async () => answers === 1 ? record : { ...record, curve: null, events: [] } };
    };`;
  return page.replace(mark, (_, open, data, close) => `<script type="application/json" id="kept">${data}${close}<script>${stub}</script>${open}null${close}`);
}

/** The share of a canvas' pixels that are near a colour, in thousandths. */
function share(canvas, colour) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let near = 0;
  for (let place = 0; place < data.length; place += 4) {
    const distance = Math.abs(data[place] - colour[0]) + Math.abs(data[place + 1] - colour[1]) + Math.abs(data[place + 2] - colour[2]);
    if (data[place + 3] > 200 && distance < 60) near += 1;
  }
  return Math.round(4000 * near / data.length * 1000) / 1000;
}

function rgb(frame, name) {
  const text = frame.getComputedStyle(frame.document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map(place => parseInt(text.slice(place, place + 2), 16));
}

function seen(frame) {
  const $ = id => frame.document.getElementById(id), text = id => $(id).innerText.replace(/\s+/g, " ").trim();
  const charts = {};
  for (const chart of frame.document.querySelectorAll(".chart")) {
    const canvas = chart.querySelector("canvas");
    charts[chart.dataset.metric] = {
      words: chart.getAttribute("aria-label"), legend: chart.querySelector(".legend").innerText.replace(/\s+/g, " "),
      train: canvas ? share(canvas, rgb(frame, "--train")) : 0, test: canvas ? share(canvas, rgb(frame, "--test")) : 0,
    };
  }
  return {
    title: frame.document.title, phase: text("phase"), banners: text("banners"), progress: text("progress-text"), results: text("results"), facts: text("facts"),
    modes: $("modes").hidden ? "" : text("modes"), events: text("events"), eventPage: text("event-page"), members: $("members-section").hidden ? "" : text("roles"),
    manifest: !$("manifest-section").hidden, runs: $("table-of-runs").hidden ? "" : text("table-of-runs"), charts,
    theme: frame.document.documentElement.dataset.theme, overflow: frame.document.documentElement.scrollWidth - frame.innerWidth,
  };
}

/** Uses keys and the mouse. Returns the answer of the page to each act. */
async function act(frame) {
  const $ = id => frame.document.getElementById(id);
  const key = (name, target = frame.document.body) => target.dispatchEvent(new frame.KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
  const axis = () => frame.document.querySelector("#axes [aria-checked=true]").dataset.axis;
  const words = metric => frame.document.querySelector(`[data-metric=${metric}]`).getAttribute("aria-label");
  const found = { axes: [axis()] };
  for (let press = 0; press < 4; press += 1) {
    key("x");
    found.axes.push(axis());
  }
  key("+");
  found.isZoomed = !$("reset").disabled;
  key("0");
  found.isWhole = $("reset").disabled;
  key("l");
  found.isLog = $("log").checked;
  key("l");
  const before = $("smoothing").value;
  key("S");
  found.isLessSmooth = $("smoothing").value < before;
  const chart = frame.document.querySelector("[data-metric=loss]");
  chart.focus();
  key("ArrowLeft", chart);
  await wait(60);
  found.atCursor = chart.querySelector(".legend").innerText.replace(/\s+/g, " ");
  const over = chart.querySelector(".u-over"), box = over.getBoundingClientRect();
  const mouse = (name, x) => over.dispatchEvent(new frame.MouseEvent(name, { clientX: box.left + x, clientY: box.top + 50, bubbles: true, button: 0, view: frame }));
  mouse("mouseenter", box.width / 2);
  mouse("mousemove", box.width / 2);
  await wait(60);
  found.inTheMiddle = chart.querySelector(".legend").innerText.replace(/\s+/g, " ");
  key("n");
  found.olderEvents = $("event-page").innerText;
  $("event-kind").value = "checkpoints";
  $("event-kind").dispatchEvent(new frame.Event("change"));
  found.checkpoints = $("events").tBodies[0].innerText.replace(/\s+/g, " ");
  $("event-kind").value = "all";
  $("event-text").value = "no such text";
  $("event-text").dispatchEvent(new frame.Event("input"));
  found.noEvents = $("events").tBodies[0].innerText.trim();
  found.words = words("loss");
  const start = performance.now();
  frame.draw();
  found.drawMilliseconds = performance.now() - start;
  return found;
}

async function probe(page, { width, height, theme, isLive, acts }) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:${height}px;border:0;display:block`;
  const loaded = new Promise(done => { frame.onload = done; });
  frame.srcdoc = isLive ? live(page) : page;
  document.body.append(frame);
  await loaded;
  await wait(isLive ? 3500 : 150);
  const inner = frame.contentWindow;
  for (let press = 0; press < 3 && inner.document.documentElement.dataset.theme !== theme; press += 1) inner.document.getElementById("theme").click();
  await wait(150);
  const found = seen(inner);
  if (acts) found.acts = await act(inner);
  note(found);
}

/** Leaves a result in the document, where the trial finds it. */
function note(found) {
  const result = document.createElement("script");
  result.type = "application/json";
  result.id = "probe";
  result.textContent = JSON.stringify(found).replaceAll("<", "\\u003c");
  document.body.append(result);
}

addEventListener("unhandledrejection", event => note({ error: String(event.reason?.stack ?? event.reason) }));

/** The pixels of a picture after it is made small. */
function small(image) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [150, 150];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, 150, 150);
  return context.getImageData(0, 0, 150, 150).data;
}

/** The mean difference of a channel between two pictures, from 0 to 1. */
function difference(one, other) {
  const [a, b] = [small(one), small(other)];
  let sum = 0;
  for (let place = 0; place < a.length; place += 1) sum += Math.abs(a[place] - b[place]);
  return sum / a.length / 255;
}

/** Compares pairs of pictures, given as data URLs. The document has loaded only when its pictures have, and the browser prints it after that. */
function compare(pairs) {
  const images = pairs.map(pair => pair.map(url => Object.assign(new Image(), { decoding: "sync", src: url })));
  addEventListener("load", () => note(images.map(([one, other]) => difference(one, other))));
}
