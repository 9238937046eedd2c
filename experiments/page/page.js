"use strict";
// Show prompts with their completions. The page is one file: it contains index and tokens as gzip in base64, and
// unpacks the tokens of a prompt when a reader opens the prompt. All text enters the page as text nodes, not as markup.

const STATUS = { ok: "right", wrong: "wrong", no_answer: "no_answer", timeout: "failed", error: "failed" };
const LABELS = { right: "right", wrong: "wrong", no_answer: "no answer", failed: "failed", unknown: "no verdict" };
const TOKENS_AT_FIRST = 2000; // a click adds the rest, so that a long completion does not delay the cards below
const ROW_HEIGHT = 74; // same value as in page.css
const MAX_DOTS = 18; // dots in a row of the list; more completions become one bar
const HEAT_STEPS = 10; // same value as in page.css

const $ = (id) => document.getElementById(id);
const state = {
  statuses: new Set(), source: "", difficulty: "", search: "", bin: null, sort: "order", turned: false,
  shade: "none", marks: true, shown: [], selected: null, token: null, drawing: 0,
};
let index = null; // header and prompts, written by build.py
let visibility = null; // the observer that fills cards when they come into view

// ---- Elements ----------------------------------------------------------------------------------------------------

/** Make an element; names that begin with "on" are listeners, strings among the children become text. */
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "text", "line", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

// Controls, direction marks and lone surrogates are invisible or reverse the line, so the page shows their code points.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\p{Cs}/u;

/** Return nodes that show a text, with a sign for each invisible character. */
function visible(text, withNewlines = false) {
  if (!HIDDEN.test(text) && !(withNewlines && text.includes("\n"))) return [text];
  const nodes = [];
  let plain = "";
  for (const character of text) {
    const hidden = HIDDEN.test(character);
    if (!hidden && !(withNewlines && character === "\n")) { plain += character; continue; }
    nodes.push(plain);
    plain = hidden ? "" : "\n";
    const number = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(hidden ? el("span", { class: "control" }, `U+${number}`) : el("span", { class: "newline" }, "↵"));
  }
  nodes.push(plain);
  return nodes.filter((node) => node !== "");
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value).toFixed(digits).replace(/^-(0\.?0*)$/, "$1");
const small = (value) => (value === null ? "–" : Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(1) : number(value, 4));
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// ---- Data --------------------------------------------------------------------------------------------------------

/** Unpack the JSON of a data element; null if the page lacks the element. */
async function unpack(id) {
  const node = $(id);
  if (!node) return null;
  const bytes = Uint8Array.from(atob(node.textContent.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Add the trainer's log-probabilities: the page stores only their difference to the engine's. */
function complete(detail) {
  if (!detail?.difference) return;
  detail.trainer = detail.engine.map((logp, i) => (logp === null || detail.difference[i] === null ? null : logp + detail.difference[i]));
}

/** Add to each prompt the values by which the list sorts and filters. */
function prepare(prompts) {
  for (const [place, prompt] of prompts.entries()) {
    const all = prompt.completions;
    for (const completion of all) completion.verdict = STATUS[completion.status] || "unknown";
    const sampled = all.some((c) => c.temperature > 0) ? all.filter((c) => c.temperature !== 0) : all;
    prompt.place = place;
    prompt.rate = mean(sampled.map((c) => Number(c.verdict === "right")));
    prompt.reward = mean(all.filter((c) => c.reward !== null).map((c) => c.reward));
    prompt.tokens = mean(all.filter((c) => c.num_tokens !== null).map((c) => c.num_tokens));
    prompt.characters = mean(all.map((c) => c.completion.length));
    prompt.verdicts = new Set(all.map((c) => c.verdict));
    prompt.bin = binOf(prompt);
  }
}

/** Return the text that a search compares: prompt, answer, source, completions. */
function searchable(prompt) {
  prompt.searchable ??= [prompt.prompt, prompt.answer ?? "", prompt.source ?? "",
    ...prompt.completions.flatMap((c) => [c.completion, c.detail ?? ""])].join("\n").toLowerCase();
  return prompt.searchable;
}

// ---- Header ------------------------------------------------------------------------------------------------------

function drawHeader() {
  const header = index.header;
  document.title = header.title;
  $("title").replaceChildren(...visible(header.title));
  const facts = header.facts.map(([name, value]) => [`${name} `, el("b", {}, ...visible(String(value)))]);
  $("facts").replaceChildren(...facts.flatMap((fact, i) => (i ? ["  ·  ", ...fact] : fact)));
  $("facts").title = header.facts.map(([name, value]) => `${name} ${value}`).join("\n");
  $("tiles").replaceChildren(...header.tiles.map(tile));
  $("tables-button").hidden = header.tables.length === 0;
  drawChart();
}

/** Show one figure with its interval. */
function tile({ name, mean: value, low, high, unit, note }) {
  const show = unit === "text" ? String : unit === "share" ? (x) => number(x, 3) : (x) => number(x, Math.abs(x) < 10 ? 2 : Math.abs(x) < 100 ? 1 : 0);
  const parts = [el("div", { class: "name" }, name), el("div", { class: "value" }, show(value))];
  if (low !== null && low !== undefined) {
    parts.push(el("div", { class: "interval" }, `${show(low)} to ${show(high)}`));
    if (unit === "share") {
      const [left, right, middle] = [low, high, value].map((x) => 100 * clamp(x, 0, 1));
      parts.push(el("div", { class: "range" },
        el("i", { style: { left: `${left}%`, width: `${right - left}%` } }), el("b", { style: { left: `calc(${middle}% - 1px)` } })));
    }
  }
  return el("div", { class: "tile", title: note ?? "95 % interval, bootstrap over prompts" }, ...parts);
}

/** Return the bin of the chart that a prompt belongs to: its pass rate, or its step. The outer bins hold 0 and 1 alone. */
function binOf(prompt) {
  if (index.header.mode === "samples") return prompt.step;
  const { bins } = index.header;
  if (prompt.rate === null || prompt.rate === 0 || prompt.rate === 1) return prompt.rate && bins;
  return Math.min(Math.max(Math.round(prompt.rate * bins), 1), bins - 1);
}

/** Draw the bars: prompts by pass rate, or mean reward by step. */
function drawChart() {
  const isRun = index.header.mode === "samples";
  const groups = new Map();
  if (!isRun) for (let bin = 0; bin <= index.header.bins; bin++) groups.set(bin, []);
  for (const prompt of index.prompts) if (prompt.bin !== null) groups.set(prompt.bin, [...(groups.get(prompt.bin) ?? []), prompt]);
  const heights = [...groups.values()].map((part) => (isRun ? mean(part.map((p) => p.reward ?? 0)) : part.length));
  const [width, height, tallest] = [isRun ? 600 : 330, 92, Math.max(1, ...heights)];
  const [pitch, room] = [width / Math.max(1, groups.size), height - 26];
  const bars = [...groups.keys()].map((bin, i) => {
    const size = (room * heights[i]) / tallest;
    const share = isRun ? `step ${bin}: mean reward ${number(heights[i])}`
      : `${percent(bin / index.header.bins)} right: ${heights[i]} of ${index.prompts.length} prompts`;
    const gap = pitch > 6 ? 2 : pitch > 3 ? 0.6 : 0;
    return el("g", { "data-bin": bin, onclick: () => chooseBin(bin) }, el("title", {}, share),
      el("rect", { class: "bar", x: i * pitch + gap / 2, y: 10 + room - size, width: Math.max(0.5, pitch - gap), height: Math.max(size, heights[i] > 0 ? 1.5 : 0), rx: Math.min(2, pitch / 4) }),
      !isRun && heights[i] > 0 && pitch > 15 ? el("text", { x: (i + 0.5) * pitch, y: 7 + room - size, "text-anchor": "middle" }, String(heights[i])) : null,
      el("rect", { class: "hit", x: i * pitch, y: 0, width: pitch, height: height - 12 }));
  });
  const bins = [...groups.keys()];
  const ends = isRun ? [`step ${bins[0]}`, `step ${bins.at(-1)}`] : ["0 %", "100 %"];
  const axis = [el("line", { x1: 0, x2: width, y1: room + 10.5, y2: room + 10.5 }),
    el("text", { x: 0, y: height - 3 }, ends[0]), el("text", { x: width, y: height - 3, "text-anchor": "end" }, ends[1])];
  if (!isRun) axis.push(el("text", { x: width / 2, y: height - 3, "text-anchor": "middle" }, "50 %"));
  const of = index.header.pooled ? ", all models together" : "";
  const caption = isRun ? `Mean reward of the samples by step${of}; click to read`
    : index.header.bins ? `Prompts by share of right completions${of}; click to filter` : "";
  $("chart").classList.toggle("wide", isRun);
  $("chart").replaceChildren(el("figcaption", {}, caption), el("svg", { viewBox: `0 0 ${width} ${height}` }, ...axis, ...bars));
}

/** Filter by a bar of the histogram, or go to the step of a bar. */
function chooseBin(bin) {
  if (index.header.mode === "samples") { goToStep(bin); return; }
  state.bin = state.bin === bin ? null : bin;
  refresh();
}

/** Show the figures by source and difficulty. */
function drawTables() {
  const cell = (value) => {
    if (value === null || typeof value !== "object") return el("td", {}, ...visible(value === null ? "–" : String(value)));
    const digits = value.unit === "share" ? 3 : 1;
    const interval = value.low === null ? "" : `${number(value.low, digits)} to ${number(value.high, digits)}`;
    return el("td", {}, number(value.mean, digits), el("small", {}, interval));
  };
  const tables = index.header.tables.flatMap(({ name, columns, rows }) => [el("h2", {}, name), el("table", { class: "figures" },
    el("thead", {}, el("tr", {}, ...columns.map((column) => el("th", {}, column)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell)))))]);
  $("tables").replaceChildren(...tables, el("p", { class: "empty" }, "95 % intervals by bootstrap over prompts."));
  $("tables").showModal();
}

function drawHelp() {
  const keys = [["j  k", "next, previous prompt"], ["g  G", "first, last prompt"], ["/", "search"], ["1  2  3  4", "prompts with a right, wrong, unanswered, failed completion"],
    ["r", "reverse the order"], ["x", "clear all filters"], ["c  C", "next, previous completion"], ["← →", "previous, next token, after a click on a token"],
    ["s", "change the shading of tokens"], ["m", "mark the 20 % of the tokens with the highest entropy"], ["[  ]", "previous, next step of a run"],
    ["o", "show or hide the figures"], ["t", "light, dark or system theme"], ["Esc", "close the panel of a token"]];
  $("help").replaceChildren(el("h2", {}, "Keys"), el("div", { class: "keys" },
    ...keys.flatMap(([key, text]) => [el("span", {}, ...key.split("  ").flatMap((k) => [el("kbd", {}, k), " "])), el("span", {}, text)])),
    el("h2", {}, "Signs"), el("div", { class: "keys" },
      ...["right", "wrong", "no_answer", "failed"].flatMap((name) => [el("span", {}, el("i", { class: `dot ${name}` })), el("span", {},
        { right: "right, according to the verifier", wrong: "wrong, possibly with a partial reward", no_answer: "the completion contains no answer", failed: "the verifier timed out or raised an error" }[name])]),
      el("span", { class: "marks" }, el("span", { class: "t high" }, "token")), el("span", {}, "one of the 20 % of the completion's tokens with the highest entropy (ESPO's first group)"),
      el("span", { class: "marks" }, el("span", { class: "t inserted" }, "token")), el("span", {}, "inserted by a tool or an environment: not trained on"),
      el("span", {}, el("span", { class: "control" }, "U+200F")), el("span", {}, "an invisible character")));
  $("help").showModal();
}

// ---- Toolbar -----------------------------------------------------------------------------------------------------

function drawToolbar() {
  const counts = {};
  for (const prompt of index.prompts) for (const c of prompt.completions) counts[c.verdict] = (counts[c.verdict] ?? 0) + 1;
  const chips = ["right", "wrong", "no_answer", "failed"].map((name, i) => el("button", {
    class: `chip ${name}`, "aria-pressed": "false", "data-status": name, title: `Prompts with a completion of this verdict (${i + 1})`,
    onclick: () => toggleStatus(name) }, el("i", { class: `dot ${name}` }), LABELS[name], el("small", {}, (counts[name] ?? 0).toLocaleString("en"))));
  $("statuses").replaceChildren(...chips);
  const choices = (id, values) => {
    const options = [["", `any ${id}`], ...values.map((value) => [value, value])];
    $(id).replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
    $(id).hidden = values.length < 2;
    $(id).onchange = (event) => { state[id] = event.target.value; refresh(); };
  };
  choices("source", index.header.sources);
  choices("difficulty", index.header.difficulties);
  const isRun = index.header.mode === "samples";
  const sorts = [["order", isRun ? "step" : "file order"], ["rate", "pass rate"], ["reward", "mean reward"], ["length", "length"]];
  $("sort").replaceChildren(...sorts.map(([value, text]) => el("option", { value }, text)));
  $("sort").onchange = (event) => { state.sort = event.target.value; refresh(); };
  const shades = [["none", "nothing"]];
  if (index.header.scales.entropy) shades.push(["entropy", "entropy"]);
  if (index.header.scales.surprise) shades.push(["surprise", "–log p"]);
  if (index.header.scales.difference) shades.push(["difference", "mismatch"]);
  state.shade = shades.length > 1 ? shades[1][0] : "none";
  $("shade").replaceChildren(...shades.map(([value, text]) => el("option", { value }, text)));
  $("shade").value = state.shade;
  $("shade").onchange = (event) => { state.shade = event.target.value; reshade(); };
  $("shade-label").hidden = shades.length < 2;
  if (isRun) drawSteps();
  drawLegend();
}

function drawLegend() {
  const scale = index.header.scales[state.shade];
  const bar = scale ? ["0", el("i"), `${scale >= 0.01 ? number(scale, 2) : scale.toExponential(0)} nats`] : [];
  const mark = index.header.scales.entropy && state.marks ? [el("span", { class: "mark", title: "One of the 20 % of the completion's tokens with the highest entropy (m)" }, "top fifth")] : [];
  $("legend").replaceChildren(...bar, ...mark);
  document.body.classList.toggle("marks", state.marks);
}

function toggleStatus(name) {
  state.statuses.has(name) ? state.statuses.delete(name) : state.statuses.add(name);
  refresh();
}

const steps = () => [...new Set(index.prompts.map((prompt) => prompt.step))].sort((a, b) => a - b);

function drawSteps() {
  $("steps").hidden = false;
  $("step").max = steps().length - 1;
  $("step").oninput = () => goToStep(steps()[Number($("step").value)]);
  $("step-back").onclick = () => moveStep(-1);
  $("step-forward").onclick = () => moveStep(1);
}

function moveStep(by) {
  if (index.header.mode !== "samples") return;
  const all = steps(), at = all.indexOf(state.selected?.step ?? all[0]);
  goToStep(all[clamp(at + by, 0, all.length - 1)]);
}

function goToStep(step) {
  const found = state.shown.find((prompt) => prompt.step === step) ?? index.prompts.find((prompt) => prompt.step === step);
  if (found && !state.shown.includes(found)) dropFilters();
  if (found) select(found);
}

function dropFilters() {
  Object.assign(state, { source: "", difficulty: "", search: "", bin: null });
  state.statuses.clear();
  $("search").value = $("source").value = $("difficulty").value = "";
  refresh();
}

// ---- The list ----------------------------------------------------------------------------------------------------

/** Filter, sort and draw the list; keep the selection if the selected prompt is still in the list. */
function refresh() {
  const needle = state.search.trim().toLowerCase();
  const isKept = (prompt) =>
    (!state.statuses.size || [...state.statuses].some((name) => prompt.verdicts.has(name)))
    && (!state.source || prompt.source === state.source) && (!state.difficulty || prompt.difficulty === state.difficulty)
    && (state.bin === null || prompt.bin === state.bin) && (!needle || searchable(prompt).includes(needle));
  const keys = { order: (p) => p.place, rate: (p) => p.rate ?? -1, reward: (p) => p.reward ?? -1, length: (p) => p.tokens ?? p.characters };
  const key = keys[state.sort], sign = state.turned ? -1 : 1;
  state.shown = index.prompts.filter(isKept).sort((a, b) => sign * (key(a) - key(b)) || a.place - b.place);
  for (const chip of $("statuses").children) chip.setAttribute("aria-pressed", state.statuses.has(chip.dataset.status));
  for (const bar of $("chart").querySelectorAll("g")) bar.classList.toggle("on", Number(bar.dataset.bin) === state.bin);
  $("chart").querySelector("svg")?.classList.toggle("filtered", state.bin !== null);
  $("direction").textContent = state.turned ? "↓" : "↑";
  $("spacer").style.height = `${state.shown.length * ROW_HEIGHT}px`;
  $("spacer").replaceChildren();
  if (!state.shown.length) $("spacer").append(el("p", { class: "empty" }, "No prompt matches these filters."));
  if (!state.shown.includes(state.selected)) select(state.shown[0] ?? null);
  else { reveal(); drawRows(); dimCards(); }
}

/** Draw only the visible rows of the list. */
function drawRows() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 6);
  const last = Math.min(state.shown.length, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 12);
  if (!state.shown.length) return;
  $("spacer").replaceChildren(...state.shown.slice(first, last).map((prompt, i) => row(prompt, first + i)));
}

function row(prompt, place) {
  const isRun = index.header.mode === "samples";
  const names = [isRun ? `step ${prompt.step}` : `#${prompt.place + 1}`, prompt.source, prompt.difficulty && `difficulty ${prompt.difficulty}`];
  const top = el("div", { class: "top" }, el("span", {}, ...visible(names.filter(Boolean).join("  ·  "))),
    prompt.rate === null ? null : el("b", {}, percent(prompt.rate)));
  const lines = (prompt.question ?? prompt.prompt).trim().split("\n").map((line) => line.trim()).filter(Boolean);
  const snippet = el("div", { class: "snippet", dir: "auto" }, ...visible((lines.join(" ⏎ ") || "(empty)").slice(0, 200)));
  const length = prompt.tokens === null ? `${Math.round(prompt.characters)} characters` : `${number(prompt.tokens, prompt.tokens < 100 ? 1 : 0)} tokens`;
  const bottom = el("div", { class: "bottom" }, verdicts(prompt), el("span", { class: "tokens", title: "mean length" }, length));
  return el("div", { class: "row", role: "option", "aria-selected": prompt === state.selected, style: { top: `${place * ROW_HEIGHT}px` },
    onclick: () => select(prompt) }, top, snippet, bottom);
}

/** Show the verdicts of a prompt: a dot for each completion, the greedy one set apart, or a bar of shares. */
function verdicts(prompt) {
  const all = prompt.completions;
  if (all.length <= MAX_DOTS) {
    return el("span", { class: "dots" }, ...all.map((c) => el("i", {
      class: `dot ${c.verdict}${c.temperature === 0 && all.length > 1 ? " first" : ""}`, title: `${nameOf(c)}: ${LABELS[c.verdict]}` })));
  }
  const counts = ["right", "wrong", "no_answer", "failed", "unknown"].map((name) => [name, all.filter((c) => c.verdict === name).length]);
  return el("span", { class: "stack" }, ...counts.filter(([, count]) => count).map(([name, count]) =>
    el("i", { class: name, title: `${LABELS[name]}: ${count}`, style: { "flex-grow": String(count) } })));
}

const nameOf = (completion) =>
  completion.label ?? (completion.temperature === 0 ? "greedy" : `sample ${completion.sample}`);

/** Scroll the list so that the selected row is in view. */
function reveal() {
  const place = state.shown.indexOf(state.selected), list = $("list");
  if (place < 0) return;
  const top = place * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
}

function move(by) {
  const place = state.shown.indexOf(state.selected);
  if (state.shown.length) select(state.shown[clamp(place + by, 0, state.shown.length - 1)]);
}

// ---- The reader --------------------------------------------------------------------------------------------------

/** Show a prompt with its completions, after unpacking their tokens. */
async function select(prompt) {
  const drawing = ++state.drawing;
  state.selected = prompt;
  closeToken();
  reveal();
  drawRows();
  if (!prompt) { $("reader").replaceChildren(el("p", { class: "empty" }, "Nothing to show.")); return; }
  history.replaceState(null, "", `#${prompt.place + 1}`);
  if (index.header.mode === "samples") {
    $("step").value = steps().indexOf(prompt.step);
    $("step-label").textContent = `step ${prompt.step}`;
    for (const bar of $("chart").querySelectorAll("g")) bar.classList.toggle("on", Number(bar.dataset.bin) === prompt.step);
  }
  const details = await unpack(`tokens-${prompt.place}`);
  if (drawing !== state.drawing) return; // the reader has opened another prompt meanwhile
  for (const detail of details ?? []) complete(detail);
  const cards = prompt.completions.map((completion, i) => card(prompt, completion, details?.[i] ?? null));
  $("reader").replaceChildren(task(prompt), el("div", { id: "cards" }, ...cards));
  $("reader").scrollTop = 0;
  visibility?.disconnect();
  visibility = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { visibility.unobserve(entry.target); entry.target.fill(); }
  }, { root: $("reader"), rootMargin: "400px" });
  for (const node of cards) visibility.observe(node);
  dimCards();
}

function task(prompt) {
  const isRun = index.header.mode === "samples";
  const title = isRun ? `Step ${prompt.step}` : `Prompt ${prompt.place + 1} of ${index.prompts.length}`;
  const right = prompt.completions.filter((c) => c.verdict === "right").length;
  const tags = [prompt.source, prompt.kind && `verified as ${prompt.kind}`, prompt.difficulty && `difficulty ${prompt.difficulty}`,
    `${right} of ${prompt.completions.length} right`, prompt.reward === null ? null : `mean reward ${number(prompt.reward)}`];
  const answer = prompt.answer === null ? null : el("div", { class: "answer" }, el("h2", {}, "Reference answer"), el("div", { class: "text", dir: "auto" }, ...visible(prompt.answer)));
  return el("div", {}, el("div", { class: "crumbs" }, el("b", {}, title), ...tags.filter(Boolean).map((tag) => el("span", { class: "tag" }, ...visible(tag)))),
    el("div", { id: "task", class: "box" }, el("h2", {}, "Prompt"), el("div", { class: "text", dir: "auto" }, ...visible(prompt.prompt)), answer));
}

function card(prompt, completion, detail) {
  const length = completion.num_tokens === null ? `${completion.completion.length} characters` : `${completion.num_tokens} tokens`;
  const parts = Object.entries(completion.parts ?? {}).map(([name, value]) => el("span", { class: "tag", title: "score of one of the kinds whose sum is the reward" }, ...visible(`${name} ${number(value)}`)));
  const finish = completion.finish_reason && el("span", { class: `tag${completion.finish_reason === "length" ? " cut" : ""}`,
    title: completion.finish_reason === "length" ? "cut at the limit of new tokens" : "ended by the policy" }, ...visible(completion.finish_reason));
  const header = el("header", {}, el("span", { class: "verdict" }, el("i", { class: `dot ${completion.verdict}` }), LABELS[completion.verdict]),
    el("span", { class: "name" }, nameOf(completion)),
    completion.reward === null ? null : el("b", { class: "reward" }, `reward ${number(completion.reward, completion.reward % 1 ? 3 : 0)}`),
    completion.advantage === null ? null : el("span", { class: "tag", title: "mean advantage of the sampled tokens" }, `advantage ${number(completion.advantage)}`),
    el("div", { class: "numbers" }, el("span", {}, length), finish, ...parts));
  const body = el("div", { class: "body text", dir: "auto" });
  const footer = el("footer", { hidden: true });
  const node = el("article", { class: `card box ${completion.verdict}`, tabindex: "-1" }, header,
    completion.detail ? el("p", { class: "detail" }, ...visible(completion.detail)) : null, body, footer);
  node.completion = completion;
  node.detail = detail;
  node.fill = () => {
    if (detail?.pieces) addTokens(node, body, 0);
    else body.replaceChildren(...visible(completion.completion || "(empty)"));
    if (body.scrollHeight <= body.clientHeight + 2) return;
    const whole = el("button", {}, "Show all");
    whole.onclick = () => { whole.textContent = node.classList.toggle("whole") ? "Show less" : "Show all"; };
    footer.append(whole);
    footer.hidden = false;
  };
  return node;
}

/** Add the tokens of a completion from a position on; a button adds the tokens beyond TOKENS_AT_FIRST. */
function addTokens(node, body, from) {
  const { pieces } = node.detail, to = from ? pieces.length : Math.min(pieces.length, TOKENS_AT_FIRST);
  const high = new Set(node.detail.high ?? []);
  const authors = authorsOf(node.detail);
  const spans = [];
  for (let i = from; i < to; i++) {
    const content = pieces[i] === "" ? [el("span", { class: "control" }, "·")] : visible(pieces[i], true);
    const marks = [high.has(i) ? " high" : "", authors && authors[i] !== "assistant" ? " inserted" : ""].join("");
    const span = el("span", { class: `t${marks}`, "data-i": i }, ...content);
    shade(span, node.detail, i);
    spans.push(span);
  }
  body.append(...spans);
  if (to < pieces.length) {
    const more = el("button", { onclick: () => { more.remove(); addTokens(node, body, to); } }, `Show ${pieces.length - to} more tokens`);
    body.append(more);
  }
}

/** Return the role that wrote each token of an episode; null if the policy wrote all of them. */
function authorsOf(detail) {
  return detail.turns ? detail.turns.flatMap(([role, length]) => Array(length).fill(role)) : null;
}

/** Return the number that shades a token; null if it was not computed. */
function valueOf(detail, i) {
  const { entropy, trainer, engine } = detail;
  switch (state.shade) {
    case "entropy": return entropy?.[i] ?? null;
    case "surprise": { const logp = trainer?.[i] ?? engine?.[i] ?? null; return logp === null ? null : -logp; }
    case "difference": { const difference = detail.difference?.[i] ?? null; return difference === null ? null : Math.abs(difference); }
    default: return null;
  }
}

function shade(span, detail, i) {
  const value = valueOf(detail, i), scale = index.header.scales[state.shade];
  span.dataset.heat = value === null || !scale ? 0 : Math.round(HEAT_STEPS * clamp(value / scale, 0, 1));
}

function reshade() {
  for (const span of $("reader").querySelectorAll(".t")) shade(span, span.closest(".card").detail, Number(span.dataset.i));
  drawLegend();
}

/** Dim the completions whose verdict is not among the filters. */
function dimCards() {
  for (const node of document.querySelectorAll(".card")) {
    node.classList.toggle("dim", state.statuses.size > 0 && !state.statuses.has(node.completion.verdict));
  }
}

// ---- Tokens ------------------------------------------------------------------------------------------------------

/** List the recorded numbers of a token, as terms and values. */
function numbersOf(detail, i) {
  const [trainer, engine] = [detail.trainer?.[i] ?? null, detail.engine?.[i] ?? null];
  const entropy = detail.entropy?.[i] ?? null, author = authorsOf(detail)?.[i] ?? null;
  const lines = [["token id", detail.ids ? String(detail.ids[i]) : null], ["entropy", entropy === null ? null : `${number(entropy, 4)} nats`],
    ["written by", author === "assistant" ? "the policy" : author],
    ["log p, trainer", trainer === null ? null : number(trainer, 5)], ["log p, engine", engine === null ? null : number(engine, 5)],
    ["difference", (detail.difference?.[i] ?? null) === null ? null : detail.difference[i].toExponential(2)]];
  return lines.filter(([, value]) => value !== null);
}

const asList = (lines) => el("dl", {}, ...lines.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

const pieceOf = (detail, i) => (detail.pieces[i] === "" ? ["(part of a character)"] : visible(detail.pieces[i], true));

function showTooltip(span) {
  const detail = span.closest(".card").detail, i = Number(span.dataset.i), box = span.getClientRects()[0], tip = $("tooltip");
  if (!box) return;
  const isHigh = span.classList.contains("high") ? [["top 20 % by entropy", "yes"]] : [];
  tip.replaceChildren(el("div", { class: "text" }, ...pieceOf(detail, i)), asList([...numbersOf(detail, i), ...isHigh]));
  tip.hidden = false;
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${clamp(box.left, 6, innerWidth - tip.offsetWidth - 6)}px`;
  tip.style.top = `${below ? box.bottom + 7 : box.top - tip.offsetHeight - 7}px`;
}

/** Open the panel of a token: its numbers. */
function openToken(span) {
  document.querySelector(".t.on")?.classList.remove("on");
  span.classList.add("on");
  state.token = span;
  const detail = span.closest(".card").detail, i = Number(span.dataset.i);
  const probability = detail.trainer?.[i] ?? detail.engine?.[i] ?? null;
  const lines = [["place", `${i + 1} of ${detail.pieces.length}`], ...numbersOf(detail, i)];
  if (probability !== null) lines.push(["probability", number(Math.exp(probability), 4)]);
  $("inspector").replaceChildren(
    el("div", { class: "head" }, el("b", {}, "Token"), el("button", { title: "Close (Esc)", onclick: closeToken }, "✕")),
    el("div", { class: "text" }, ...pieceOf(detail, i)), asList(lines));
  $("inspector").hidden = false;
  span.scrollIntoView({ block: "nearest" });
}

function closeToken() {
  document.querySelector(".t.on")?.classList.remove("on");
  state.token = null;
  $("inspector").hidden = true;
  $("tooltip").hidden = true;
}

function moveToken(by) {
  const i = Number(state.token.dataset.i) + by;
  const next = state.token.closest(".card").querySelector(`.t[data-i="${i}"]`);
  if (next) openToken(next);
}

function moveCard(by) {
  const cards = [...document.querySelectorAll(".card")], at = cards.indexOf(document.activeElement?.closest?.(".card"));
  const next = cards[clamp(at + by, 0, cards.length - 1)];
  next?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "nearest" });
}

// ---- Keys, theme, start ------------------------------------------------------------------------------------------

function changeTheme() {
  const order = ["", "light", "dark"], root = document.documentElement;
  const next = order[(order.indexOf(root.dataset.theme ?? "") + 1) % order.length];
  if (next) root.dataset.theme = next; else delete root.dataset.theme;
  try { localStorage.setItem("theme", next); } catch { /* a page without storage starts with the system's theme */ }
}

function toggleOverview() { $("overview").hidden = !$("overview").hidden; drawRows(); }

function changeShade() {
  const options = [...$("shade").options].map((option) => option.value);
  state.shade = $("shade").value = options[(options.indexOf(state.shade) + 1) % options.length];
  reshade();
}

const KEYS = {
  j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), g: () => move(-Infinity), G: () => move(Infinity),
  PageDown: () => move(8), PageUp: () => move(-8),
  "/": () => $("search").focus(), 1: () => toggleStatus("right"), 2: () => toggleStatus("wrong"), 3: () => toggleStatus("no_answer"), 4: () => toggleStatus("failed"),
  r: () => { state.turned = !state.turned; refresh(); }, x: dropFilters, c: () => moveCard(1), C: () => moveCard(-1),
  s: changeShade, m: () => { state.marks = !state.marks; drawLegend(); }, "[": () => moveStep(-1), "]": () => moveStep(1),
  o: toggleOverview, t: changeTheme, "?": drawHelp, Escape: closeToken,
  ArrowLeft: () => state.token && moveToken(-1), ArrowRight: () => state.token && moveToken(1),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const isField = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isField && event.key === "Escape") { event.target.blur(); return; }
    if (isField || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  let timer = 0;
  $("search").oninput = () => { clearTimeout(timer); timer = setTimeout(() => { state.search = $("search").value; refresh(); }, 120); };
  $("direction").onclick = KEYS.r;
  $("list").onscroll = () => requestAnimationFrame(drawRows);
  addEventListener("resize", drawRows);
  $("theme-button").onclick = changeTheme;
  $("help-button").onclick = drawHelp;
  $("tables-button").onclick = drawTables;
  $("overview-button").onclick = toggleOverview;
  for (const dialog of document.querySelectorAll("dialog")) dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  $("reader").addEventListener("mouseover", (event) => {
    const span = event.target.closest?.(".t");
    if (span) showTooltip(span); else $("tooltip").hidden = true;
  });
  $("reader").addEventListener("mouseleave", () => { $("tooltip").hidden = true; });
  $("reader").addEventListener("scroll", () => { $("tooltip").hidden = true; }, true);
  $("reader").addEventListener("click", (event) => {
    const span = event.target.closest?.(".t");
    if (span) openToken(span);
  });
}

async function start() {
  try { const theme = localStorage.getItem("theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* see changeTheme() */ }
  if (typeof DecompressionStream === "undefined") {
    $("reader").textContent = "This browser cannot unpack gzip; a browser of 2024 or later can.";
    return;
  }
  index = await unpack("index");
  prepare(index.prompts);
  drawHeader();
  drawToolbar();
  listen();
  const wanted = index.prompts[Number(location.hash.slice(1)) - 1];
  refresh();
  if (wanted) select(wanted);
  document.documentElement.dataset.ready = "";
}

start().catch((error) => { $("reader").textContent = `The page cannot be shown: ${error}`; });
