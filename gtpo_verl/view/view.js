"use strict";
// Text of the run reaches the page through text nodes only, and hidden characters are spelled out by `drawText`.

const FOLD = { above: 400, head: 160, tail: 80 }; // longer completions show their two ends
const HEAT_NATS = 2;
const HEAT_RATIO = Math.log(2);
const PARTNERS_SHOWN = 5;
const CONTEXT = 6;

const $ = (id) => document.getElementById(id);
const readData = (id) => JSON.parse($(id).textContent);

const run = readData("run-data");
const applied = run.gtpo_applied;
const state = {
  step: 0, group: 0, colour: "fate", order: "sampled", unfold: false,
  filter: run.filter_active, threshold: run.gtpo.entropy_threshold,
  marked: null, chosen: null, held: false,
};
let rows = [];
let groups = [];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const number = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const signed = (x) => (x > 0 ? "+" : "") + number(x);
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// ---------------------------------------------------------------- text of tokens

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}\p{Zl}\p{Zp}]|^\p{M}/gu;
const BYTE = 0xdc00; // a byte that is no UTF-8 is kept as the lone surrogate U+DC00 + byte
const CONTINUED = "\udfff"; // a token that only holds later bytes of a character of the token before it
const utf8 = new TextDecoder("utf-8", { fatal: true });

/** The text of each token. A character whose bytes are spread over tokens is shown at the token of its first byte. */
function spell(ids) {
  const words = ids.map((id) => run.pieces[id]);
  for (let start = 0; start < words.length; start++) {
    if (typeof words[start] === "string") continue;
    let end = start;
    const bytes = [], owner = [];
    for (; end < words.length && typeof words[end] !== "string"; end++) {
      for (const byte of words[end]) { bytes.push(byte); owner.push(end); }
      words[end] = "";
    }
    for (let at = 0; at < bytes.length; ) {
      const [text, length] = decodeAt(bytes, at);
      words[owner[at]] += text;
      at += length;
    }
    for (let i = start; i < end; i++) words[i] ||= CONTINUED;
  }
  return words;
}

function decodeAt(bytes, at) {
  const first = bytes[at];
  const length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  try {
    return [utf8.decode(new Uint8Array(bytes.slice(at, at + length))), length];
  } catch {
    return [String.fromCharCode(BYTE + first), 1];
  }
}

/** Append text to an element; what cannot be seen, or would change its surroundings, is spelled out. */
function drawText(element, text) {
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > end) element.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    element.append(make("span", { className: "mark" }, nameOf(found[0])));
    if (found[0] === "\n" || found[0] === "\t") element.append(found[0]);
    if (/\p{M}/u.test(found[0])) element.append(found[0]);
  }
  if (end < text.length) element.append(text.slice(end));
  if (text === " ") element.replaceChildren(make("span", { className: "mark" }, "␣"));
  return element;
}

function nameOf(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (character === CONTINUED) return "⋯";
  if (/\p{M}/u.test(character)) return "◌";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code >= BYTE && code < BYTE + 256) return `⟨${(code - BYTE).toString(16).toUpperCase()}⟩`;
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

// ---------------------------------------------------------------- the numbers of a step

/** [[count, value], …] as an array of one value per token. */
function unroll(runs, length) {
  const values = new Float32Array(length);
  let at = 0;
  for (const [n, value] of runs) values.fill(value, at, (at += n));
  return values;
}

class Completion {
  constructor(record, number) {
    Object.assign(this, record);
    this.number = number;
    this.name = `#${number + 1}`;
    this.length = this.ids.length;
    for (const field of ["lambda", "advantages", "own", "trained"]) this[field] = unroll(record[field], this.length);
    this.rank = new Int32Array(this.length).fill(-1); // number of a token among the model's own
    this.owned = [];
    for (let t = 0; t < this.length; t++) if (this.own[t]) this.rank[t] = this.owned.push(t) - 1;
  }

  get words() {
    return (this._words ??= spell(this.ids));
  }

  get kept() {
    return !state.filter || this.entropy <= state.threshold || (run.gtpo.filter_scope === "negative" && this.A >= 0);
  }

  fate(t) {
    if (!this.trained[t]) return "other";
    if (!this.kept) return "filtered";
    return this.lambda[t] < 1 ? "protected" : this.lambda[t] > 1 ? "doubled" : "plain";
  }

  /** The advantage of a token, with the filter as it is set on the page. */
  advantage(t) {
    if (!applied || this.kept === this.keep) return this.advantages[t];
    if (!this.kept || !this.trained[t]) return 0;
    return (this.A - run.gtpo.entropy_coeff * this.entropy) * this.lambda[t];
  }

  /** How much more probable the trainer holds a token than the inference engine did, as a logarithm; null: not known. */
  logRatio(t) {
    const trainer = this.token_logprob?.[t], inference = this.token_inference?.[t];
    return (trainer ?? null) === null || (inference ?? null) === null ? null : (trainer - inference) / 1000;
  }

  /** Completions of opposite sign with the same token at the same place: [{completion, t, fromEnd}]. */
  partners(t) {
    const rank = this.rank[t], found = [];
    if (rank < 0) return found;
    for (const other of groups[state.group].completions) {
      if (other.A * this.A >= 0) continue;
      const places = [[other.owned[rank], false], [other.owned[other.owned.length - this.owned.length + rank], true]];
      for (const [place, fromEnd] of places) {
        if (place !== undefined && other.ids[place] === this.ids[t]) found.push({ completion: other, t: place, fromEnd });
      }
    }
    return found;
  }

  /** The partners that put a token on the conflict mask: on its forward run, its backward run, or both. */
  conflicts(t) {
    const partners = this.partners(t);
    if (run.gtpo.conflict_span !== "leading") return this.lambda[t] === 1 ? [] : partners;
    const forward = this.rank[t] < this.prefix_len, backward = this.owned.length - 1 - this.rank[t] < this.suffix_len;
    return partners.filter((partner) => (partner.fromEnd ? backward : forward));
  }
}

function loadStep() {
  const { step } = run.steps[state.step];
  groups = readData(`step-${step}`).map((group) => ({
    ...group, completions: group.completions.map((record, number) => new Completion(record, number)),
  }));
  const shared = groups.map(({ completions }) => completions.some((c) => c.prefix_len || c.suffix_len || c.lambda.some((x) => x !== 1)));
  state.group = Math.max(0, shared.indexOf(true));
  $("group").replaceChildren(...groups.map((group, number) => {
    const rewards = group.completions.map((c) => c.reward);
    const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
    const range = low === high ? amount(low) : `${amount(low)} to ${amount(high)}`;
    const note = shared[number] ? "" : ", no conflict";
    return make("option", { value: number }, `${number + 1} of ${groups.length}: ${rewards.length} completions, reward ${range}${note}`);
  }));
  $("group").value = state.group;
}

const amount = (x) => number(x, Number.isInteger(x) ? 0 : 2);

// ---------------------------------------------------------------- drawing

const rowOf = new WeakMap(); // element → Row

function paint(span, completion, t) {
  span.className = `token ${completion.fate(t)}`;
  if (completion.ids[t] === state.marked) span.classList.add("marked");
  if (state.colour === "entropy") {
    span.style.setProperty("--heat-share", `${Math.min(100, completion.token_entropy[t] / (10 * HEAT_NATS))}%`);
  } else if (state.colour === "advantage") {
    const advantage = completion.advantage(t);
    span.style.setProperty("--up-share", `${80 * Math.abs(advantage) / groups[state.group].top}%`);
    span.classList.toggle("falls", advantage < 0);
  } else if (state.colour === "ratio") {
    const ratio = completion.logRatio(t) ?? 0;
    span.style.setProperty("--up-share", `${Math.min(80, 80 * Math.abs(ratio) / HEAT_RATIO)}%`);
    span.classList.toggle("falls", ratio < 0);
  }
}

class Row {
  constructor(completion) {
    this.completion = completion;
    this.head = make("h2");
    this.body = make("div", { className: "text", dir: "ltr" });
    this.element = make("article", { ariaLabel: `completion ${completion.name}` }, this.head, this.body);
    rowOf.set(this.element, this);
    const { length } = completion;
    this.spans = new Map(); // of the tokens that are in the page
    if (state.unfold || length <= FOLD.above) {
      this.body.append(...this.draw(0, length));
    } else {
      this.fold = make("button", { className: "fold", type: "button", onclick: () => this.unfold() });
      this.body.append(...this.draw(0, FOLD.head), this.fold, ...this.draw(length - FOLD.tail, length));
    }
    this.label();
  }

  draw(start, end) {
    const spans = [];
    for (let t = start; t < end; t++) {
      const span = drawText(make("span", { tabIndex: -1 }), this.completion.words[t]);
      span.t = t;
      paint(span, this.completion, t);
      this.spans.set(t, span);
      spans.push(span);
    }
    return spans;
  }

  unfold() {
    this.fold.replaceWith(...this.draw(FOLD.head, this.completion.length - FOLD.tail));
    this.fold = null;
  }

  label() {
    const c = this.completion, fates = countFates(c, 0, c.length);
    const verdict = c.kept ? (state.filter ? "kept" : "no filter") : applied ? "filtered" : "would be filtered";
    this.head.replaceChildren(
      make("b", {}, c.name),
      make("span", {}, `reward ${amount(c.reward)}`),
      make("span", { className: c.A > 0 ? "up" : c.A < 0 ? "down" : "", title: "advantage over the group's average" },
        `A ${signed(c.A)}`),
      run.rollouts
        ? make("span", { className: "badge", title: "verl's rollout files do not say whether a completion ended by itself" }, "end unknown")
        : make("span", { title: "mean entropy, nats per token" }, `entropy ${number(c.entropy)}`),
      ...(run.rollouts ? [] : [make("span", { className: `badge ${c.kept ? "" : "dropped"}` }, verdict)]),
      make("span", {}, count(c.length, "token")),
      ...["protected", "doubled"].filter((fate) => fates[fate]).map((fate) => make("span", {}, `${fates[fate]} ${fate}`)),
    );
    if (this.fold) {
      const hidden = countFates(c, FOLD.head, c.length - FOLD.tail);
      const parts = ["protected", "doubled"].filter((fate) => hidden[fate]).map((fate) => `, ${hidden[fate]} ${fate}`);
      this.fold.textContent = `… ${count(c.length - FOLD.head - FOLD.tail, "more token")}${parts.join("")} …`;
    }
  }

  repaint() {
    this.label();
    for (const [t, span] of this.spans) paint(span, this.completion, t);
  }

  span(t) {
    if (!this.spans.has(t)) this.unfold();
    return this.spans.get(t);
  }
}

function countFates(completion, start, end) {
  const fates = { protected: 0, doubled: 0 };
  if (completion.kept) {
    for (let t = start; t < end; t++) {
      if (completion.lambda[t] !== 1 && completion.trained[t]) fates[completion.lambda[t] < 1 ? "protected" : "doubled"]++;
    }
  }
  return fates;
}

function drawGroup() {
  release();
  const group = groups[state.group], { completions } = group;
  group.top = completions.reduce((top, c) => c.advantages.reduce((m, x) => Math.max(m, Math.abs(x)), top), 0) || 1;
  const ordered = [...completions];
  if (state.order === "reward") ordered.sort((a, b) => b.reward - a.reward);
  if (state.order === "entropy") ordered.sort((a, b) => b.entropy - a.entropy);
  rows = ordered.map((completion) => new Row(completion));
  const prompt = $("prompt").querySelector(".text");
  prompt.replaceChildren();
  drawText(prompt, spell(group.prompt).join("").replaceAll(CONTINUED, ""));
  $("rows").replaceChildren(...rows.map((row) => row.element));
  if (rows[0]?.completion.length) rows[0].span(0).tabIndex = 0;
  describe();
}

function repaint() {
  for (const row of rows) row.repaint();
  if (state.chosen) show(state.chosen.row, state.chosen.t);
  describe();
}

/** Everything around the rows: the summary, the scale of the colours, the most frequent tokens, the filter. */
function describe() {
  $("rows").className = state.colour;
  const fates = { protected: 0, doubled: 0 };
  for (const { completion } of rows) {
    const found = countFates(completion, 0, completion.length);
    fates.protected += found.protected;
    fates.doubled += found.doubled;
  }
  const all = groups.flatMap((group) => group.completions), dropped = all.filter((c) => !c.kept).length;
  const tokens = rows.reduce((sum, row) => sum + row.completion.length, 0);
  const filter = run.rollouts ? "" : state.filter
    ? `The filter ${applied ? "takes" : "would take"} ${dropped} of the ${count(all.length, "completion")} of this step.`
    : "The filter is off.";
  $("summary").textContent = `This group: ${count(rows.length, "completion")}, ${count(tokens, "token")}, ` +
    `${fates.protected} protected, ${fates.doubled} doubled. ${filter}`;
  $("threshold-name").textContent = `${number(state.threshold, 3)} nats`;
  $("threshold").value = state.threshold;
  $("threshold").disabled = !state.filter;
  $("filter").checked = state.filter;
  $("unfold").setAttribute("aria-pressed", state.unfold);
  const top = groups[state.group].top;
  const ends = {
    entropy: ["0", `${HEAT_NATS} nats and more`],
    advantage: [number(-top), signed(top)],
    ratio: ["trainer's probability half the inference engine's", "twice"],
  }[state.colour];
  $("scale").hidden = !ends;
  if (ends) $("scale").replaceChildren(`${ends[0]} `, make("span", { className: `ramp ${state.colour}` }), ` ${ends[1]}`);
  describeFrequent(all);
}

function describeFrequent(completions) {
  const counts = new Map();
  for (const c of completions) {
    if (!c.kept) continue;
    for (let t = 0; t < c.length; t++) {
      if (c.lambda[t] === 1 || !c.trained[t]) continue;
      if (!counts.has(c.ids[t])) counts.set(c.ids[t], [0, 0]);
      counts.get(c.ids[t])[c.lambda[t] < 1 ? 0 : 1]++;
    }
  }
  const top = [...counts].sort(([, a], [, b]) => b[0] - a[0] || b[1] - a[1]).slice(0, 12);
  $("frequent").querySelector("tbody").replaceChildren(...top.map(([id, [zeroed, doubled]]) => {
    const button = make("button", { type: "button", className: "text", ariaPressed: String(id === state.marked) });
    drawText(button, spell([id])[0].replaceAll(/[\n\t]/g, (c) => nameOf(c)));
    button.onclick = () => {
      state.marked = id === state.marked ? null : id;
      repaint();
    };
    return make("tr", {}, make("td", {}, button), make("td", {}, String(zeroed)), make("td", {}, String(doubled)));
  }));
}

// ---------------------------------------------------------------- one token

function release() {
  for (const span of document.querySelectorAll(".chosen, .partner")) span.classList.remove("chosen", "partner");
  state.chosen = null;
  state.held = false;
  $("token").hidden = true;
}

function show(row, t) {
  const { held } = state;
  release();
  Object.assign(state, { chosen: { row, t }, held });
  row.span(t).classList.add("chosen");
  const conflicts = row.completion.conflicts(t);
  for (const partner of conflicts) rowFor(partner.completion)?.spans.get(partner.t)?.classList.add("partner");
  $("token-body").replaceChildren(...tokenDetails(row.completion, t, conflicts));
  $("token").hidden = false;
}

const rowFor = (completion) => rows.find((row) => row.completion === completion);

function tokenDetails(c, t, conflicts) {
  const id = c.ids[t], piece = run.pieces[id];
  const title = make("h3", {}, drawText(make("span", { className: `text token ${c.fate(t)}` }), c.words[t]), ` of ${c.name}`);
  const probability = (logprob) => (logprob === null ? "0" : `${number(100 * Math.exp(logprob / 1000), 1)} %`);
  const ratio = c.logRatio(t);
  const facts = [
    ["advantage", signed(c.advantage(t))],
    ["λ", amount(c.lambda[t])],
    ...(run.rollouts ? [] : [
      ["entropy", c.token_entropy[t] === null ? "not finite" : `${number(c.token_entropy[t] / 1000, 3)} nats`],
      ["probability", probability(c.token_logprob[t])],
    ]),
    ...(c.token_inference ? [
      ["… at inference", probability(c.token_inference[t])],
      ["ratio of both", ratio === null ? "not finite" : number(Math.exp(ratio), 3)],
    ] : []),
    ["place", c.rank[t] < 0 ? "–" : `${c.rank[t] + 1} from the start, ${c.owned.length - c.rank[t]} from the end`],
    ["token id", String(id)],
  ];
  if (typeof piece !== "string") facts.push(["bytes", piece.map((b) => b.toString(16).toUpperCase().padStart(2, "0")).join(" ")]);
  const list = make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  return [title, make("p", {}, sentence(c, t, conflicts)), list, ...partnerList(conflicts)];
}

function sentence(c, t, conflicts) {
  const fate = c.fate(t);
  if (fate === "other") return "Not trained: not the model's own token, or rejected by the trainer.";
  if (fate === "filtered") {
    return `Filtered: the mean entropy of this completion, ${number(c.entropy)}, is above the threshold ` +
      `${number(state.threshold)}, so no token of it ${applied ? "is" : "would be"} trained on.`;
  }
  if (fate === "protected") {
    const weight = c.lambda[t] === 0 ? "" : ` with ${amount(c.lambda[t])} times the weight`;
    const course = applied ? ["It is left alone", "It is made less likely"] : ["GTPO would leave it alone", "GTPO would make it less likely"];
    return "Protected: this completion is worse than the group's average, and better ones have the same token at the " +
      `same place. ${course[weight ? 1 : 0]}${weight}.`;
  }
  if (fate === "doubled") {
    return `Doubled: this completion is better than the group's average, and worse ones have the same token at the ` +
      `same place. ${applied ? "It is made" : "GTPO would make it"} more likely with ${amount(c.lambda[t])} times the weight.`;
  }
  const advantage = c.advantage(t);
  const course = advantage > 0 ? "It is made more likely" : advantage < 0 ? "It is made less likely" : "It is left as it is";
  if (conflicts.length) return `Plain: completions of the other sign share it, but their weight is 1 in this run. ${course}.`;
  const others = c.partners(t).length;
  if (others) return `Plain: completions of the other sign have this token here, but after the shared run ended. ${course}.`;
  if (c.A === 0) {
    return "Plain: the reward of this completion is the group's average, so it has no signal of its own. " +
      `${course}${advantage ? ", by the entropy term alone" : ""}.`;
  }
  return `Plain: no completion of the other sign has this token at this place. ${course}, like its whole completion.`;
}

function partnerList(conflicts) {
  if (!conflicts.length) return [];
  const shown = conflicts.slice(0, PARTNERS_SHOWN).map(({ completion: other, t, fromEnd }) => {
    const line = make("span", { className: "text fate", dir: "ltr" });
    for (let i = Math.max(0, t - CONTEXT); i < Math.min(other.length, t + CONTEXT + 1); i++) {
      const span = make("span", { className: `token ${other.fate(i)}${i === t ? " partner" : ""}` });
      line.append(drawText(span, other.words[i].replaceAll(/[\n\t]/g, (c) => nameOf(c))));
    }
    const button = make("button", { type: "button", className: "context" });
    button.append(`${other.name} (A ${signed(other.A)}), from the ${fromEnd ? "end" : "start"}: `, line);
    button.onclick = () => choose(rowFor(other), t);
    return button;
  });
  const rest = conflicts.length - shown.length;
  return [make("p", {}, "Shared with:"), ...shown, ...(rest > 0 ? [make("p", { className: "small" }, `and ${rest} more`)] : [])];
}

/** Go to a token: focus, numbers, partners. */
function choose(row, t) {
  const span = row.span(t);
  for (const other of document.querySelectorAll('#rows .token[tabindex="0"]')) other.tabIndex = -1;
  span.tabIndex = 0;
  span.focus({ preventScroll: true });
  span.scrollIntoView({ block: "nearest" });
  show(row, t);
}

function tokenAt(event) {
  const span = event.target.closest?.("#rows .token");
  return span && { row: rowOf.get(span.closest("article")), t: span.t };
}

$("rows").addEventListener("pointerover", (event) => {
  const at = tokenAt(event);
  if (at && !state.held) show(at.row, at.t);
});
$("rows").addEventListener("click", (event) => {
  const at = tokenAt(event);
  if (!at) return;
  const again = state.held && state.chosen?.row === at.row && state.chosen.t === at.t;
  state.held = !again;
  choose(at.row, at.t);
});
$("rows").addEventListener("focusin", (event) => {
  const at = tokenAt(event);
  if (at && !(state.chosen?.row === at.row && state.chosen.t === at.t)) show(at.row, at.t);
});
$("rows").addEventListener("keydown", (event) => {
  const at = tokenAt(event);
  if (!at || event.ctrlKey || event.metaKey || event.altKey) return;
  const last = at.row.completion.length - 1, place = rows.indexOf(at.row);
  const moves = {
    ArrowRight: [at.row, Math.min(last, at.t + 1)],
    ArrowLeft: [at.row, Math.max(0, at.t - 1)],
    Home: [at.row, 0],
    End: [at.row, last],
    ArrowDown: [rows[place + 1], at.t],
    ArrowUp: [rows[place - 1], at.t],
  };
  if (event.key === "Enter" || event.key === " ") {
    state.held = !state.held;
  } else if (event.key in moves) {
    const [row, t] = moves[event.key];
    if (row?.completion.length) choose(row, Math.min(t, row.completion.length - 1));
  } else {
    return;
  }
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") release();
});
$("close").addEventListener("click", release);

// ---------------------------------------------------------------- the strip over the steps

const svg = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

function drawStrip() {
  const fates = ["protected", "doubled", "filtered"], { steps } = run;
  $("steps").hidden = steps.length < 2;
  const share = (step, fate) => step[fate] / Math.max(1, step.tokens);
  const top = Math.max(0.01, ...steps.map((step) => fates.reduce((sum, fate) => sum + share(step, fate), 0)));
  const rewards = steps.map((step) => step.reward), low = Math.min(...rewards), high = Math.max(...rewards);
  const strip = $("strip");
  strip.setAttribute("viewBox", `0 0 ${steps.length} 100`);
  steps.forEach((step, at) => {
    const bar = svg("g", {});
    bar.append(svg("rect", { class: "back", x: at, y: 0, width: 1, height: 100 }));
    let y = 100;
    for (const fate of fates) {
      const height = (100 * share(step, fate)) / top;
      bar.append(svg("rect", { class: fate, x: at + 0.1, y: (y -= height), width: 0.8, height }));
    }
    bar.addEventListener("click", () => chooseStep(at));
    strip.append(bar);
  });
  const points = rewards.map((reward, at) => `${at + 0.5},${95 - (90 * (reward - low)) / (high - low || 1)}`);
  strip.append(svg("polyline", { points: points.join(" ") }));
  $("strip-top").textContent = `${number(100 * top, 1)} %`;
  $("strip-reward").textContent = `${amount(low)} to ${amount(high)}`;
  $("step").max = steps.length - 1;
}

function goToStep(at) {
  state.step = at;
  $("step").value = at;
  $("step-name").textContent = run.steps[at].step;
  $("step").setAttribute("aria-valuetext", `step ${run.steps[at].step}`);
  [...$("strip").querySelectorAll("g")].forEach((bar, i) => bar.classList.toggle("now", i === at));
  loadStep();
  drawGroup();
}

/** Go to a step and keep it in the address, so that the page opens there again when it is reloaded. */
function chooseStep(at) {
  history.replaceState(null, "", `#${run.steps[at].step}`);
  goToStep(at);
}

// ---------------------------------------------------------------- controls

$("step").addEventListener("input", (event) => chooseStep(Number(event.target.value)));
$("group").addEventListener("change", (event) => { state.group = Number(event.target.value); drawGroup(); });
$("order").addEventListener("change", (event) => { state.order = event.target.value; drawGroup(); });
$("colour").addEventListener("change", (event) => { state.colour = event.target.value; repaint(); });
$("filter").addEventListener("change", (event) => { state.filter = event.target.checked; repaint(); });
$("threshold").addEventListener("input", (event) => { state.threshold = Number(event.target.value); repaint(); });
$("reset").addEventListener("click", () => {
  Object.assign(state, { filter: run.filter_active, threshold: run.gtpo.entropy_threshold });
  repaint();
});
$("unfold").addEventListener("click", () => { state.unfold = !state.unfold; drawGroup(); });
$("controls").addEventListener("submit", (event) => event.preventDefault());

// ---------------------------------------------------------------- start

const filterWords = run.filter_active ? "on" : "off";
$("run").textContent = `${run.source}: ${run.rollouts ? "verl's rollout files" : run.adv_estimator}, ` +
  `${count(run.steps.length, "step")}. ` + (run.rollouts ? "" : `Filter ${filterWords}: completion_filter=${run.gtpo.completion_filter}, initial entropy ` +
  `${run.initial_entropy === null ? "unknown" : number(run.initial_entropy, 3)}, threshold ` +
  `${number(run.gtpo.entropy_threshold, 3)} nats per token.`);
if (run.follow) $("run").append(" Load the page again for newer steps.");
if (run.rollouts) {
  $("notice").hidden = false;
  $("notice").textContent = "These are the rollout files of verl: text, which this page tokenises again. Ends are unknown: verl leaves " +
    "out special tokens, so a completion that was cut off looks like one that ended by itself. A token may not be the " +
    "one that was sampled, and text that a tool wrote looks like the model's. The colours show what GTPO would do " +
    "with its default settings, without its filter; A is GRPO's, from the scores.";
} else if (!applied) {
  $("notice").hidden = false;
  $("notice").textContent = `This run trains with ${run.adv_estimator}, not with GTPO. The colours show what GTPO would do ` +
    "to these tokens: the protected and doubled ones are those that this run pushes both ways. Advantages are the run's own.";
}
for (const element of document.querySelectorAll("[data-lambda]")) {
  element.textContent = amount(run.gtpo[`conflict_weight_${element.dataset.lambda}`]);
}
if (run.rollouts) for (const element of document.querySelectorAll(".needs-entropy")) element.hidden = true;
if (!run.has_inference) for (const element of document.querySelectorAll(".needs-inference")) element.hidden = true;
$("threshold").max = Math.max(1.5 * run.gtpo.entropy_threshold, 1.05 * run.max_entropy);
if (window.matchMedia("(max-width: 60rem)").matches) $("guide").open = $("frequent").open = false;
drawStrip();
const wanted = run.steps.findIndex(({ step }) => `#${step}` === location.hash);
goToStep(wanted >= 0 ? wanted : run.follow ? run.steps.length - 1 : 0);
