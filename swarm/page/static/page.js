// What the server says of the run, shown as it changes. Whatever strangers wrote (names, notes, prompts) becomes text and nothing else.
const STALE_SECONDS = 25; // the server says something at least every 10 s
const AGAIN_SECONDS = [1, 2, 4, 8, 15];
const MOST_PICTURES = 24; // of one prompt
const MOST_FORMER = 20; // peers that nobody here has seen, of whose samples the ledger knows
const PHASES = {
  train: ["trains", "good"], averaging: ["averages", "good"], assist: ["assists", "good"], done: ["done", "good"], joining: ["joins", ""],
  catching_up: ["catches up", "warn"], paused: ["paused", "warn"], leaving: ["leaves", "warn"],
};

const $ = (id) => document.getElementById(id);
let heard = 0; // when the server last said anything, in ms of this page's clock
let ahead = 0; // its clock minus ours, in seconds
let view = null;
let connected = false;
let listener = 0; // which of those that were begun listens: the last one
let reading = null; // ends what it reads
let shown = { history: -1, pictures: -1 };
let token = takeToken();

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + location.search); // out of the address bar and of what is shared from it
  }
  return sessionStorage.getItem("token") || "";
}

const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});

// ---------------------------------------------------------------- words

const count = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`);
const rate = (speed) => (speed >= 100 ? count.format(Math.round(speed)) : speed.toFixed(1));

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) [bytes, unit] = [bytes / 1000, unit + 1];
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(seconds < 36000 ? 1 : 0)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

const plural = (number, word) => `${count.format(number)} ${word}${number === 1 ? "" : "s"}`;
const ago = (time) => { const age = Date.now() / 1000 + ahead - time; return age < 15 ? "now" : `${duration(age)} ago`; };

function set(id, text) { const place = $(id); if (place.textContent !== text) place.textContent = text; }
function show(id, visible) { $(id).hidden = !visible; }
function bar(id, share) { $(id).value = share ?? 0; }

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---------------------------------------------------------------- listening

async function listen() {
  const mine = ++listener; // a token given while an earlier one is still tried begins another
  for (let attempt = 0; mine === listener; attempt++) {
    reading = new AbortController();
    try {
      const response = await fetch("v1/events", { headers: headers(), cache: "no-store", signal: reading.signal });
      if (response.status === 401) return ask();
      if (!response.ok) throw new Error(`status ${response.status}`);
      show("gate", false);
      for await (const event of events(response.body)) {
        attempt = 0;
        if (event) take(event);
      }
    } catch (error) {
      console.debug("listening failed", error);
    }
    connected = false;
    judge();
    await new Promise((done) => setTimeout(done, 1000 * AGAIN_SECONDS[Math.min(attempt, AGAIN_SECONDS.length - 1)]));
  }
}

// Server-sent events by fetch: EventSource cannot send a token except in the URL, which ends up in logs.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    [connected, heard] = [true, performance.now()];
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.startsWith("data: ") ? JSON.parse(part.slice(6)) : null;
  }
}

function ask() {
  show("refused", token !== "");
  for (const id of ["board", "empty", "banner"]) show(id, false);
  show("gate", true);
  set("name", "distributed-diffusion");
  pill("locked", "warn");
  [view, heard, connected] = [null, 0, false];
  token = "";
  sessionStorage.removeItem("token");
}

$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  sessionStorage.setItem("token", token);
  listen();
});

function take(news) {
  view = news;
  if (view.progress && !view.trouble) ahead = view.progress.server_time - Date.now() / 1000;
  draw();
  if (view.history !== shown.history) { shown.history = view.history; loadHistory(); }
  if (view.pictures !== shown.pictures) { shown.pictures = view.pictures; loadGallery(); }
}

async function load(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response;
}

// ---------------------------------------------------------------- drawing

function pill(text, kind, place = $("state")) {
  place.textContent = text;
  place.className = `pill ${kind}`;
}

// Whether what is shown can be believed: asked every second, also while nothing is heard.
function judge() {
  const trouble = view?.trouble ?? "";
  const silent = heard ? (performance.now() - heard) / 1000 : 0;
  const lost = !connected && $("gate").hidden;
  const stale = heard > 0 && (lost || silent > STALE_SECONDS);
  if (connected && silent > STALE_SECONDS) reading.abort(); // the line is dead, and would say so only after minutes
  document.body.classList.toggle("stale", stale || trouble !== "");
  const banner = $("banner");
  banner.hidden = !(stale || (lost && !heard && performance.now() > 3000));
  if (!banner.hidden) {
    banner.className = "banner bad";
    set("banner", heard ? `No news from the server for ${duration(silent)}. This is the last it said; trying again.` : "The server does not answer; trying again.");
    pill(heard ? "stale" : "no connection", "bad");
  } else if (trouble) {
    banner.hidden = false;
    banner.className = "banner bad";
    set("banner", `The run cannot be seen: ${trouble}${view.progress ? ` This was so ${ago(view.progress.server_time)}.` : ""}`);
    pill("stale", "bad");
  } else if (view) status();
  set("age", heard && !stale ? "live, once a second" : heard ? `last heard ${duration(silent)} ago` : "");
}

function status() {
  const run = view.progress;
  if (!run) return pill("no run yet", "warn");
  if (run.finished) return pill("finished", "good");
  if (run.state === "paused") return pill("paused by the host", "warn");
  if (!view.figures.trainers) return pill("nobody trains", "warn");
  pill("live", "good");
}

function draw() {
  const run = view.progress;
  show("board", Boolean(run));
  show("empty", !run);
  if (!run) {
    set("name", "distributed-diffusion");
    set("run", "");
    set("empty-title", "No run yet");
    set("empty-text", "The server is up and has its pictures. The run begins when the first peer founds one.");
  } else {
    drawGlance(run, view.figures);
    drawModel(run);
    drawJoin(run);
    drawPeers(run);
  }
  judge();
}

function drawGlance(run, figures) {
  set("name", run.run_name);
  document.title = `${run.run_name} · ${figures.share === null ? short.format(run.samples) : percent(figures.share)}`;
  set("run", run.run_id);
  const lasted = columns ? lastedSeconds() : 0;
  const about = [run.model, run.method, run.resolution ? `${run.resolution} pixels` : "", lasted ? `${duration(lasted)}${run.finished ? " in all" : " so far"}` : ""];
  set("about", about.filter(Boolean).join(" · "));
  set("samples", run.total_samples ? `${count.format(run.samples)} of ${count.format(run.total_samples)}` : count.format(run.samples));
  $("samples-bar").hidden = figures.share === null;
  bar("samples-bar", figures.share);
  const left = figures.eta_seconds === null ? "no forecast while nobody trains" : `about ${duration(figures.eta_seconds)} left`;
  const early = run.total_samples > run.samples ? "the host ended it early" : "all of them are trained";
  const ended = run.total_samples ? early : "the host ended it";
  const goes = run.total_samples ? `${percent(figures.share)}, ${left}` : "a run without an end";
  set("eta", !run.finished ? goes : lasted ? `${ended}, in ${duration(lasted)}` : ended);
  set("round", count.format(run.round));
  $("round-bar").hidden = run.finished;
  bar("round-bar", figures.round_share);
  set("round-text", run.finished ? "the last one" : `next: ${count.format(run.waiting_samples)} of ${count.format(figures.round_target)} samples`);
  const once = run.ledger?.counted;
  show("sum", once !== undefined && run.repeated_samples > 0);
  set("sum", once === undefined ? "" : `${count.format(once)} counted once each and ${count.format(run.repeated_samples)} repeated are ${count.format(run.samples)} in the state`);
  const over = run.finished && columns ? overall() : null; // its peers have left, and say nothing of their speed any more
  set("speed", over ? (over.speed === null ? "–" : rate(over.speed)) : rate(run.samples_per_second));
  set("speed-text", over ? "on average, of the whole run" : "of all that train");
  const loss = over ? over.loss : run.loss;
  set("loss", loss === null ? "–" : loss.toFixed(4));
  set("loss-text", over ? "at the end" : "mean of the peers, by their speed");
  const held = figures.validation_loss;
  show("validation-text", held !== null);
  set("validation-text", held === null ? "" : `held-out pictures: ${held.toFixed(4)} after round ${count.format(figures.validation_round)}`);
  show("epoch-card", run.epoch !== null);
  if (run.epoch !== null) {
    set("epoch", (run.ledger.counted / run.dataset_samples).toFixed(1));
    bar("epoch-bar", figures.epoch_share);
    $("epoch-bar").hidden = run.finished;
    set("epoch-text", run.finished ? `passes over ${plural(run.dataset_samples, "picture")}`
      : `the oldest open, number ${count.format(run.epoch + 1)}: ${count.format(run.epoch_samples)} of ${count.format(run.dataset_samples)} samples`);
  }
  set("utilisation", percent(over ? over.utilisation : figures.utilisation));
  set("traffic", figures.transfer_seconds
    ? `last round: ${size(figures.sent_bytes)} sent, ${size(figures.received_bytes)} received in all, ${figures.transfer_seconds < 1 ? "less than 1 s" : duration(figures.transfer_seconds)}`
    : over ? "of the peers' time, in training" : run.round ? "none of them has averaged with another lately" : "no round averaged between peers yet");
}

// What remains to be said when all have left: of the history, which the server keeps across its restarts.
function lastedSeconds() {
  const times = columns.time;
  return times.length > 1 ? times[times.length - 1] - times[0] : 0;
}

function overall() {
  const last = (values) => values.findLast((value) => value !== null) ?? null;
  const seconds = lastedSeconds(), samples = columns.samples;
  const used = columns.utilisation.filter((value) => value !== null);
  return {
    speed: seconds ? (samples[samples.length - 1] - samples[0]) / seconds : null,
    loss: last(columns.loss),
    utilisation: used.length ? used.reduce((sum, value) => sum + value, 0) / used.length : null,
  };
}

// How one takes part: the address of this server or, of dd-monitor, that of a peer.
function drawJoin(run) {
  show("join-section", !run.finished);
  const here = run.ledger !== null;
  const address = here ? `--datasetserver ${new URL(".", location.href).href.replace(/[/]$/, "")}` : "--peers /ip4/ADDRESS-OF-A-PEER";
  set("join-command", `dd-peer ${address}${token ? " --token YOUR-TOKEN" : ""}`);
  set("join-text", here && ["localhost", "127.0.0.1"].includes(location.hostname) ? "From another machine: with the address of this one." : "");
}

// The clipboard is there for https and localhost only; elsewhere the browser copies what is selected.
document.addEventListener("click", async ({ target }) => {
  if (!target.dataset?.copies) return;
  const source = $(target.dataset.copies);
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    getSelection().selectAllChildren(source);
    if (!document.execCommand("copy")) return;
  }
  target.textContent = "Copied";
  setTimeout(() => { target.textContent = "Copy"; }, 2000);
});

// How one gets what has been trained: a model is made by dd-export, of the state that the server keeps or that the peers hold.
function drawModel(run) {
  const state = run.checkpoint;
  const here = run.ledger !== null; // else this is dd-monitor, from which nothing can be had but this page
  const had = state || run.peers.length > 0;
  set("model-title", run.finished ? "The result" : "The model so far");
  const of = (round, samples) => `round ${count.format(round)}, ${count.format(samples)} samples`;
  set("model-text", state ? `The server keeps the state of ${of(state.round, state.samples)}. Make a model of it with:`
    : had ? `The peers hold the state of ${of(run.round, run.samples)}. Make a model of it with:`
    : !run.finished ? "Nobody is here to give it. It can be had as soon as a peer is back."
    : run.samples ? "Every peer that was there at the end has it in its output folder."
    : "There is none: nothing was trained.");
  show("model-how", Boolean(had));
  const address = here ? new URL(".", location.href).href.replace(/[/]$/, "") : "/ip4/ADDRESS-OF-A-PEER";
  set("model-command", `dd-export ${address} --out model`);
  show("model-link", Boolean(state));
  set("model-link-text", state ? `(${size(state.bytes)}), to keep in settled/ of a peer's folder` : "");
  if (state) {
    $("model-link").href = `v1/states/${state.digest}.state`;
    $("model-link").download = `round-${state.round}-samples-${state.samples}.state`;
  }
}

// A link cannot show a token: what is behind one is fetched first.
$("model-link").addEventListener("click", async (event) => {
  if (!token) return;
  event.preventDefault();
  const made = element("a");
  made.download = event.target.download;
  try {
    made.href = URL.createObjectURL(await (await load(event.target.getAttribute("href"))).blob());
    made.click();
    setTimeout(() => URL.revokeObjectURL(made.href), 60000);
  } catch (error) {
    console.debug(error);
    set("model-link-text", "could not be fetched; dd-export says why");
  }
});

function drawPeers(run) {
  const gone = view.gone.map((peer) => ({ ...peer, gone: true }));
  const counted = run.samples_by_peer;
  const total = counted ? Object.values(counted).reduce((sum, samples) => sum + samples, 0) : 0;
  const order = (peer) => [peer.phase === "assist" ? 1 : 0, -peer.samples_per_second, peer.peer_id];
  const live = [...run.peers].sort((a, b) => { const [x, y] = [order(a), order(b)]; return x[0] - y[0] || x[1] - y[1] || (x[2] < y[2] ? -1 : 1); });
  const here = new Set([...live, ...gone].map((peer) => peer.peer_id));
  const known = new Set([...Object.keys(run.banned ?? {}), ...Object.keys(run.proven ?? {}), ...Object.keys(counted ?? {})]);
  const former = [...known].filter((id) => !here.has(id)).sort((a, b) => (counted?.[b] ?? 0) - (counted?.[a] ?? 0)).slice(0, MOST_FORMER);
  gone.push(...former.map((peer_id) => ({ peer_id, phase: "leaving", gone: true }))); // who left before the server was started again
  const rows = [...live, ...gone].map((peer) => row(peer, run, counted && total ? (counted[peer.peer_id] ?? 0) / total : null));
  $("peers").tBodies[0].replaceChildren(...rows);
  set("peers-count", `${view.figures.trainers} train${view.figures.assistants ? `, ${view.figures.assistants} assist` : ""}${gone.length ? `, ${gone.length} gone` : ""}`);
  show("peers", rows.length > 0);
  show("no-peers", rows.length === 0);
  set("no-peers", run.finished ? "The run is finished, and its peers have left." : "Nobody is here yet. Peers appear a few seconds after they start.");
}

function row(peer, run, share) {
  const line = element("tr", peer.gone ? "gone" : "");
  const who = element("td");
  who.append(element("span", "peer-name", peer.name || `…${peer.peer_id.slice(-8)}`));
  who.title = peer.peer_id;
  if (peer.hardware) who.append(element("span", "hardware", peer.hardware));
  if (run.trusted?.includes(peer.peer_id)) who.append(element("span", "hardware", "trusted to average"));
  const [banned, proven] = [run.banned?.[peer.peer_id], run.proven?.[peer.peer_id]];
  const note = banned !== undefined ? `banned by the host: ${banned}` : proven !== undefined ? `banned by a proof: ${proven}` : peer.note;
  if (note) who.append(element("span", "note", note));
  for (const found of view.figures.findings.filter((each) => each.peer === peer.peer_id)) who.append(audited(found, run));
  const state = element("td");
  const badge = element("span");
  const [word, kind] = (banned ?? proven) !== undefined ? ["banned", "bad"] : peer.gone ? (peer.phase === "leaving" && !peer.note ? ["left", ""] : ["gone", "bad"]) : PHASES[peer.phase] ?? [peer.phase, ""];
  pill(word, kind, badge);
  state.append(badge);
  const number = (label, text) => { const cell = element("td", "number", text); cell.dataset.label = label; return cell; };
  const behind = run.round - peer.round;
  const link = element("td", "", peer.gone ? "" : linkOf(peer));
  link.dataset.label = "link";
  line.append(
    who, state, number("share", percent(share)),
    number("samples/s", peer.gone || peer.phase === "assist" ? "–" : rate(peer.samples_per_second)),
    number("round", peer.round === undefined ? "–" : behind > 0 && !peer.gone ? `${peer.round} (${behind} behind)` : String(peer.round)),
    number("loss", peer.loss === null || peer.loss === undefined ? "–" : peer.loss.toFixed(4)),
    link, number("seen", peer.gone && !peer.seen ? "–" : ago(peer.gone ? peer.seen : view.seen[peer.peer_id] ?? 0)),
  );
  return line;
}

// What an assisting peer measured of this one's contributions: a number for people, by which nobody is banned.
function audited(found, run) {
  const by = run.peers.find((peer) => peer.peer_id === found.by)?.name || `…${found.by.slice(-8)}`;
  const signed = (change) => `${change < 0 ? "−" : "+"}${Math.abs(change).toPrecision(2)}`;
  const own = found.own === null || found.own === undefined ? "" : `, of its own pictures ${signed(found.own)}`;
  const said = `${found.reported ? "makes the model worse: " : "audited: "}loss ${signed(found.change)} ± ${found.error.toPrecision(2)} by one contribution${own} (${plural(found.rounds, "round")}, by ${by})`;
  return element("span", found.reported ? "note" : "hardware", said);
}

function linkOf(peer) {
  const behind = peer.client_mode ? "cannot be dialled" : "";
  if (!peer.transfer_seconds) return behind || "–";
  const mbit = (bytes) => Math.round((8e-6 * bytes) / peer.transfer_seconds);
  return `↑ ${mbit(peer.sent_bytes)} ↓ ${mbit(peer.received_bytes)} Mbit/s${behind ? `, ${behind}` : ""}`;
}

// ---------------------------------------------------------------- charts

const charts = {};
let columns = null; // of the history, as last heard

async function loadHistory() {
  try {
    columns = await (await load("v1/history")).json();
    plot();
    if (view) draw(); // else a token was refused meanwhile
  } catch (error) {
    console.debug(error);
    shown.history = -1;
  }
}

function plot() {
  const points = (x, y) => columns[x].map((value, index) => ({ x: value, y: columns[y][index] })).filter((point) => point.y !== null);
  const loss = means(points("samples", "loss"));
  const speed = points("time", "samples_per_second");
  show("charts-empty", speed.length < 2);
  // A chart of nothing would have an axis from -0.5 to 0.5.
  show("loss-figure", loss.length > 1);
  show("speed-figure", speed.length > 1);
  if (loss.length > 1) line("loss-chart", loss, (value) => short.format(value));
  if (speed.length > 1) {
    const spanned = speed[speed.length - 1].x - speed[0].x;
    const parts = spanned > 86400 ? { month: "short", day: "numeric", hour: "2-digit" } : { hour: "2-digit", minute: "2-digit", ...(spanned < 600 ? { second: "2-digit" } : {}) };
    line("speed-chart", speed, (value) => new Date(1000 * value).toLocaleString([], { ...parts, hourCycle: "h23" }), 0);
  }
}

// One point for all that have the same samples: those are of one round.
function means(points) {
  const groups = new Map();
  for (const { x, y } of points) groups.set(x, [...(groups.get(x) ?? []), y]);
  return [...groups].map(([x, ys]) => ({ x, y: ys.reduce((sum, y) => sum + y, 0) / ys.length }));
}

function line(id, data, tick, least) {
  const style = getComputedStyle(document.body);
  const [ink, grid, accent] = ["--quiet", "--edge", "--accent"].map((name) => style.getPropertyValue(name).trim());
  const axis = { ticks: { color: ink, maxTicksLimit: $(id).parentElement.clientWidth < 420 ? 4 : 6, maxRotation: 0, autoSkipPadding: 12 }, grid: { color: grid } };
  const chart = (charts[id] ??= new Chart($(id), { type: "line", data: { datasets: [{}] } }));
  chart.data.datasets[0] = { data, borderColor: accent, backgroundColor: accent, borderWidth: 1.8, pointRadius: data.length < 3 ? 3 : 0, pointHitRadius: 12 };
  chart.options = {
    animation: false, responsive: true, maintainAspectRatio: false, parsing: false, normalized: true,
    interaction: { mode: "nearest", axis: "x", intersect: false },
    plugins: {
      legend: { display: false },
      tooltip: { displayColors: false, callbacks: { title: (items) => tick(items[0].parsed.x) } },
    },
    scales: { x: { ...axis, type: "linear", bounds: "data", ticks: { ...axis.ticks, callback: (value) => tick(value) } }, y: { ...axis, min: least, grace: "5%" } },
  };
  chart.update("none");
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (columns) plot(); });

// ---------------------------------------------------------------- pictures

const pictures = new Map(); // digest -> object URL, fetched once

async function loadGallery() {
  try {
    const { pictures: list } = await (await load("v1/pictures")).json();
    show("gallery-section", list.length > 0);
    const prompts = [...new Set(list.map((picture) => picture.prompt))];
    $("gallery").replaceChildren(...prompts.map((prompt) => strip(prompt, list.filter((picture) => picture.prompt === prompt))));
    const known = new Set(list.map((picture) => picture.digest));
    for (const [digest, url] of pictures) if (!known.has(digest)) { URL.revokeObjectURL(url); pictures.delete(digest); }
  } catch (error) {
    console.debug(error);
    shown.pictures = -1;
  }
}

function strip(prompt, list) {
  const whole = element("div");
  whole.append(element("p", "strip-prompt", prompt || "(without words)"));
  const row = element("div", "strip");
  for (const picture of list.slice(0, MOST_PICTURES)) {
    const figure = element("figure");
    const button = element("button");
    button.type = "button";
    const image = element("img");
    image.alt = `${prompt}, round ${picture.round}`;
    seen.observe(image);
    image.dataset.digest = picture.digest;
    if (pictures.has(picture.digest)) image.src = pictures.get(picture.digest);
    button.append(image);
    button.addEventListener("click", () => enlarge(image.src, picture));
    figure.append(button, element("figcaption", "quiet", `round ${count.format(picture.round)}, ${short.format(picture.samples)} samples`));
    row.append(figure);
  }
  whole.append(row);
  return whole;
}

const seen = new IntersectionObserver(async (entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || target.src) continue;
    seen.unobserve(target);
    const digest = target.dataset.digest;
    try {
      if (!pictures.has(digest)) pictures.set(digest, URL.createObjectURL(await (await load(`v1/pictures/${digest}`)).blob()));
      target.src = pictures.get(digest);
    } catch (error) {
      console.debug(error);
    }
  }
}, { rootMargin: "300px" });

function enlarge(source, picture) {
  if (!source) return;
  $("large-picture").src = source;
  $("large-picture").alt = picture.prompt;
  set("large-text", `${picture.prompt} — round ${count.format(picture.round)}, ${count.format(picture.samples)} samples`);
  $("large").showModal();
}

$("large").addEventListener("click", () => $("large").close());

setInterval(judge, 1000);
listen();
