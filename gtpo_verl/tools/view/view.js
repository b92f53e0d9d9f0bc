"use strict";
// Text of the run reaches the page through text nodes only, and hidden characters are spelled out by `drawText`.

const FOLD = { above: 400, head: 160, tail: 80 }; // longer completions show their two ends
const PARTNERS_SHOWN = 5;
const CONTEXT = 6;
const HEAT = {
  entropy: { share: (c, t) => c.entropy[t] / 2, ends: ["0", "2 nats and more"] },
  lambda: { share: (c, t) => (c.loss_mask[t] ? c.lambda[t] / 2 : NaN), ends: ["λ = 0", "λ = 2 and more"] },
  mismatch: { share: (c, t) => Math.abs(c.logRatio(t)) / Math.LN2, ends: ["equal probabilities", "a factor of 2 and more"] },
};

const $ = (id) => document.getElementById(id);
const readData = (id) => JSON.parse($(id).textContent);

const run = readData("run-data");
const applied = run.gtpo_applied;
const state = {
  step: 0,
  group: 0,
  colour: "fate",
  threshold: run.threshold ?? Infinity, // of the filter, as it is set on the page
  chosen: null, // { row, t }: the token whose details are shown
  held: false, // whether they stay while the pointer is over other tokens
};
let groups = []; // of the step
let rows = []; // the completions of the group

function make(tag, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

const number = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const signed = (x) => (x > 0 ? "+" : "") + number(x);
const amount = (x) => number(x, Number.isInteger(x) ? 0 : 2);
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

const HIDDEN = /([\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}\p{Zl}\p{Zp}]|^\p{M})/u;

/** Append text to an element; what cannot be seen, or would change its surroundings, is spelled out. */
function drawText(element, text) {
  if (text === "" || text === " ") { // a token of the first bytes of a character alone is empty
    element.append(make("span", { className: "mark" }, text ? "␣" : "⋯"));
    return element;
  }
  const parts = text.split(HIDDEN); // in turn what can be seen and a character that cannot
  for (const [at, part] of parts.entries()) {
    const isHidden = at % 2 === 1;
    if (isHidden) element.append(make("span", { className: "mark" }, nameOf(part)));
    const isDrawn = !isHidden || /[\n\t\p{M}]/u.test(part); // beside its name such a character does its work
    if (part && isDrawn) element.append(part);
  }
  return element;
}

function nameOf(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (/\p{M}/u.test(character)) return "◌";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

const oneLine = (text) => text.replaceAll(/[\n\t]/g, nameOf);

/** A completion, with the names of the dump; it lacks what is not known of it, such as the entropy of a rollout. */
class Completion {
  constructor(record, number) {
    Object.assign(this, record);
    for (const [name, value] of Object.entries(record)) {
      if (value?.runs) this[name] = value.runs.flatMap(([n, x]) => Array(n).fill(x));
    }
    this.name = `#${number + 1}`;
    this.length = this.token_ids.length;
    this.own = [...this.token_ids.keys()].filter((t) => this.response_mask[t]); // places of the model's own tokens
  }

  get kept() {
    if (run.rollouts || state.threshold === Infinity) return true;
    return this.trajectory_entropy <= state.threshold || !this.can_be_filtered;
  }

  /** On which side of the group's average it is, as a class of the style. */
  get side() {
    if (this.group_advantage === 0) return "";
    return this.group_advantage > 0 ? "up" : "down";
  }

  /** What the filter does to it, in words. */
  get verdict() {
    if (run.rollouts) return "end unknown";
    if (state.threshold === Infinity) return "no filter";
    if (this.kept) return "kept";
    return applied ? "filtered" : "would be filtered";
  }

  /** What GTPO does to a token. */
  fate(t) {
    if (!this.loss_mask[t]) return "other";
    if (!this.kept) return "filtered";
    if (this.lambda[t] < 1) return "protected";
    return this.lambda[t] > 1 ? "doubled" : "plain";
  }

  /** How many tokens from `start` to `end` are protected, and doubled, without zeros: [[fate, number]]. */
  counts(start = 0, end = this.length) {
    const counts = { protected: 0, doubled: 0 };
    for (let t = start; t < end; t++) {
      const fate = this.fate(t);
      if (fate in counts) counts[fate]++;
    }
    return Object.entries(counts).filter(([, number]) => number > 0);
  }

  /** How many of the model's own tokens another completion shares from its beginning on. */
  sharedBeginning(other) {
    const length = Math.min(this.own.length, other.own.length);
    for (let rank = 0; rank < length; rank++) {
      if (this.token_ids[this.own[rank]] !== other.token_ids[other.own[rank]]) return rank;
    }
    return length;
  }

  /** How much more probable the trainer holds a token than the inference engine did, as a logarithm. */
  logRatio(t) {
    return (this.trainer_logprobs[t] ?? NaN) - (this.inference_logprobs[t] ?? NaN);
  }

  /** Completions of opposite sign with the same token at the same place: [{completion, t, fromEnd}]. */
  partners(t) {
    const rank = this.own.indexOf(t);
    const partners = [];
    if (rank < 0) return partners;
    for (const other of rows) {
      if (other.group_advantage * this.group_advantage >= 0) continue;
      // Where the other completion has no such place, the token there is undefined, which equals none.
      const fromStart = other.own[rank];
      const fromEnd = other.own[other.own.length - this.own.length + rank];
      if (other.token_ids[fromStart] === this.token_ids[t]) {
        partners.push({ completion: other, t: fromStart, fromEnd: false });
      }
      if (other.token_ids[fromEnd] === this.token_ids[t]) {
        partners.push({ completion: other, t: fromEnd, fromEnd: true });
      }
    }
    return partners;
  }

  /** The partners that put a token on the conflict mask: on its forward run, its backward run, or both. */
  conflicts(t) {
    if (run.gtpo.token_weights) return []; // it may not go by what completions share
    const partners = this.partners(t);
    const rank = this.own.indexOf(t);
    if (run.gtpo.conflict_span !== "leading") return this.lambda[t] === 1 ? [] : partners;
    const isForward = rank < this.prefix_len;
    const isBackward = this.own.length - 1 - rank < this.suffix_len;
    return partners.filter((partner) => (partner.fromEnd ? isBackward : isForward));
  }

  /** Make its `element`, whose `spans` are those of its tokens that are in the page. */
  draw() {
    this.head = make("h2");
    this.spans = new Map();
    this.folded = this.length > FOLD.above ? [FOLD.head, this.length - FOLD.tail] : [this.length, this.length];
    this.fold = make("button", { className: "fold", type: "button", onclick: () => this.unfold(), hidden: this.length <= FOLD.above });
    const body = make("div", { className: "text", dir: "ltr" });
    body.append(...this.drawTokens(0, this.folded[0]), this.fold, ...this.drawTokens(this.folded[1], this.length));
    this.element = make("article", { ariaLabel: `completion ${this.name}`, row: this }, this.head, body);
    this.label();
  }

  drawTokens(start, end) {
    return this.token_strings.slice(start, end).map((word, i) => {
      const span = drawText(make("span", { t: start + i }), word);
      this.paint(span);
      this.spans.set(span.t, span);
      return span;
    });
  }

  paint(span) {
    span.className = `token ${this.fate(span.t)}`;
    const share = HEAT[state.colour]?.share(this, span.t);
    span.style.setProperty("--heat-share", `${share >= 0 ? Math.min(100, 100 * share) : 0}%`);
  }

  unfold() {
    this.fold.replaceWith(...this.drawTokens(...this.folded));
  }

  label() {
    const facts = [`reward ${amount(this.reward)}`];
    if (!run.rollouts) facts.push(`entropy ${number(this.trajectory_entropy)}`);
    facts.push(count(this.length, "token"));
    this.head.replaceChildren(
      make("b", {}, this.name),
      make("span", { className: this.side, title: "advantage over the group's average" }, `A ${signed(this.group_advantage)}`),
      ...facts.map((fact) => make("span", {}, fact)),
      ...this.counts().map(([fate, n]) => make("span", { className: `key-word ${fate}` }, `${n} ${fate}`)),
      make("span", { className: `badge ${this.kept ? "" : "dropped"}` }, this.verdict),
    );
    if (this.ended === false) this.head.append(make("span", { className: "badge unended" }, "did not end"));

    const [start, end] = this.folded;
    const folded = [count(end - start, "more token")];
    for (const [fate, n] of this.counts(start, end)) folded.push(`${n} ${fate}`);
    this.fold.textContent = `… ${folded.join(", ")} …`;
  }

  repaint() {
    this.label();
    for (const span of this.spans.values()) this.paint(span);
  }

  span(t) {
    if (!this.spans.has(t)) this.unfold();
    return this.spans.get(t);
  }
}

/** Completions from the best on, and below each good one the bad one that shares most of its beginning. */
function goodAboveBad(completions) {
  const byAdvantage = [...completions].sort((a, b) => b.group_advantage - a.group_advantage);
  const good = byAdvantage.filter((c) => c.group_advantage > 0);
  const average = byAdvantage.filter((c) => c.group_advantage === 0);
  const bad = byAdvantage.filter((c) => c.group_advantage < 0);
  const ordered = [];
  for (const better of good) {
    ordered.push(better);
    if (!bad.length) continue;
    const shared = bad.map((worse) => better.sharedBeginning(worse));
    ordered.push(...bad.splice(shared.indexOf(Math.max(...shared)), 1));
  }
  return [...ordered, ...average, ...bad];
}

function drawGroup() {
  release();
  const { prompt, completions } = groups[state.group];
  rows = goodAboveBad(completions);
  for (const row of rows) row.draw();
  const text = drawText(make("div", { className: "text", dir: "ltr" }), prompt);
  $("prompt").querySelector(".text").replaceWith(text);
  text.scrollTop = text.scrollHeight; // to the question, behind what stands in every prompt
  $("rows").replaceChildren(...rows.map((row) => row.element));
  drawSurroundings();
}

function repaint() {
  for (const row of rows) row.repaint();
  if (state.chosen) show(state.chosen.row, state.chosen.t);
  drawSurroundings();
}

/** Draw what stands around the rows: the scale of a colour, the filter, the summary of the step and its tokens. */
function drawSurroundings() {
  const ends = HEAT[state.colour]?.ends;
  $("rows").className = ends ? "heat" : "fate";
  $("scale").hidden = !ends;
  if (ends) $("scale").replaceChildren(`${ends[0]} `, make("span", { className: "ramp" }), ` ${ends[1]}`);

  const isFiltered = state.threshold !== Infinity;
  $("threshold").value = Math.min(state.threshold, $("threshold").max);
  $("threshold-name").textContent = isFiltered ? `filter above ${number(state.threshold, 3)} nats` : "no filter";

  const all = groups.flatMap(({ completions }) => completions);
  const numbers = Object.entries(run.numbers[run.steps[state.step].step]).map(([name, x]) => `${name} ${amount(x)}`);
  let summary = `This step: ${numbers.join(" · ")}.`;
  if (isFiltered) {
    const dropped = all.filter((c) => !c.kept).length;
    summary += ` The filter ${applied ? "takes" : "would take"} ${dropped} of the ${count(all.length, "completion")}.`;
  }
  $("summary").textContent = summary;
  listFrequent(all);
}

function listFrequent(completions) {
  const counts = new Map(); // text of a token → how often it is protected, and doubled
  for (const c of completions) {
    for (const [t, word] of c.token_strings.entries()) {
      const fate = c.fate(t);
      if (fate !== "protected" && fate !== "doubled") continue;
      if (!counts.has(word)) counts.set(word, { protected: 0, doubled: 0 });
      counts.get(word)[fate]++;
    }
  }
  const mostFirst = [...counts].sort(([, a], [, b]) => b.protected - a.protected || b.doubled - a.doubled);
  const lines = mostFirst.slice(0, 12).map(([word, number]) => make("tr", {},
    drawText(make("td", { className: "text" }), oneLine(word)),
    make("td", {}, String(number.protected)),
    make("td", {}, String(number.doubled)),
  ));
  $("frequent").querySelector("tbody").replaceChildren(...lines);
}

function release() {
  for (const span of document.querySelectorAll(".chosen, .partner")) span.classList.remove("chosen", "partner");
  Object.assign(state, { chosen: null, held: false });
  $("token").hidden = true;
}

function show(row, t) {
  const { held } = state;
  release();
  Object.assign(state, { chosen: { row, t }, held });
  row.span(t).classList.add("chosen");
  const conflicts = row.conflicts(t);
  for (const partner of conflicts) partner.completion.spans.get(partner.t)?.classList.add("partner");
  $("token-body").replaceChildren(...tokenDetails(row, t, conflicts));
  $("token").hidden = false;
}

function tokenDetails(c, t, conflicts) {
  const title = make("h3", {}, drawText(make("span", { className: `text token ${c.fate(t)}` }), c.token_strings[t]), ` of ${c.name}`);
  const list = make("dl");
  for (const [name, value] of tokenFacts(c, t)) list.append(make("dt", {}, name), make("dd", {}, value));
  return [title, make("p", {}, sentence(c, t, conflicts)), list, ...partnerList(conflicts)];
}

/** What is known of a token: [[name, value]]. */
function tokenFacts(c, t) {
  const place = c.own.indexOf(t);
  const ifFinite = (value, text) => (Number.isFinite(value ?? NaN) ? text(value) : "not finite");
  const probability = (logprob) => ifFinite(logprob, (x) => `${number(100 * Math.exp(x), 1)} %`);
  const facts = [["advantage", signed(c.advantages[t])], ["λ", amount(c.lambda[t])]];
  if (c.entropy) facts.push(["entropy", ifFinite(c.entropy[t], (x) => `${number(x, 3)} nats`)]);
  if (c.trainer_logprobs) facts.push(["probability", probability(c.trainer_logprobs[t])]);
  if (c.inference_logprobs) {
    facts.push(["… at inference", probability(c.inference_logprobs[t])]);
    facts.push(["ratio of both", ifFinite(c.logRatio(t), (x) => number(Math.exp(x), 3))]);
  }
  facts.push(["place", place < 0 ? "–" : `${place + 1} from the start, ${c.own.length - place} from the end`]);
  facts.push(["token id", String(c.token_ids[t])]);
  return facts;
}

/** What happens to a token, and why. */
function sentence(c, t, conflicts) {
  const fate = c.fate(t);
  if (fate === "other") return "Not trained: not the model's own token, or rejected by the trainer.";
  if (fate === "filtered") {
    return `Filtered: the mean entropy of this completion, ${number(c.trajectory_entropy)}, is above the threshold ` +
      `${number(state.threshold)}, so no token of it ${applied ? "is" : "would be"} trained on.`;
  }
  if (run.gtpo.token_weights) {
    return `${applied ? "The run's" : "This"} rule ${run.gtpo.token_weights} gives it the weight ${amount(c.lambda[t])}.`;
  }
  const gives = `GTPO ${applied ? "gives" : "would give"} it the weight ${amount(c.lambda[t])}.`;
  if (fate === "protected") {
    return "Protected: this completion is worse than the group's average, and better ones have the same token at the " +
      `same place. ${gives}`;
  }
  if (fate === "doubled") {
    return "Doubled: this completion is better than the group's average, and worse ones have the same token at the " +
      `same place. ${gives}`;
  }
  let course = "It is left as it is";
  if (c.advantages[t] > 0) course = "It is made more likely";
  if (c.advantages[t] < 0) course = "It is made less likely";
  return `Plain: ${whyPlain(c, t, conflicts)}. ${course}.`;
}

function whyPlain(c, t, conflicts) {
  if (applied && !c.keep) return "no mask holds it, and the run filtered this completion";
  if (conflicts.length) return "completions of the other sign share it, but their weight is 1 in this run";
  if (c.partners(t).length) return "completions of the other sign have this token here, but after the shared run ended";
  if (c.group_advantage === 0) {
    return "the reward of this completion is the group's average, so it has no signal of its own";
  }
  return "no completion of the other sign has this token at this place";
}

function partnerList(conflicts) {
  if (!conflicts.length) return [];
  const shown = conflicts.slice(0, PARTNERS_SHOWN).map(({ completion: other, t, fromEnd }) => {
    const line = make("span", { className: "text fate", dir: "ltr" });
    for (let i = Math.max(0, t - CONTEXT); i < Math.min(other.length, t + CONTEXT + 1); i++) {
      const span = make("span", { className: `token ${other.fate(i)}${i === t ? " partner" : ""}` });
      line.append(drawText(span, oneLine(other.token_strings[i])));
    }
    const button = make("button", { type: "button", className: "context", onclick: () => goTo(other, t) });
    button.append(`${other.name} (A ${signed(other.group_advantage)}), from the ${fromEnd ? "end" : "start"}: `, line);
    return button;
  });
  const list = [make("p", {}, "Shared with:"), ...shown];
  const rest = conflicts.length - shown.length;
  if (rest > 0) list.push(make("p", { className: "small" }, `and ${rest} more`));
  return list;
}

/** Show a token and bring it into sight. */
function goTo(row, t) {
  show(row, t);
  row.span(t).scrollIntoView({ block: "nearest" });
}

for (const kind of ["pointerover", "click"]) {
  $("rows").addEventListener(kind, ({ target }) => {
    const span = target.closest(".token");
    const row = span?.closest("article").row;
    const { chosen, held } = state;
    if (!span || (kind === "pointerover" && held)) return;
    if (kind === "click") state.held = !(held && chosen.row === row && chosen.t === span.t);
    show(row, span.t);
  });
}

const MOVES = {
  ArrowRight: { down: 0, right: 1 },
  ArrowLeft: { down: 0, right: -1 },
  ArrowDown: { down: 1, right: 0 },
  ArrowUp: { down: -1, right: 0 },
};

/** Go from the chosen token to its neighbour; from none to the first one. */
function move({ down, right }) {
  const { row, t } = state.chosen ?? { row: rows[0], t: -1 };
  const to = rows[rows.indexOf(row) + down];
  if (to?.length) goTo(to, Math.max(0, Math.min(t + right, to.length - 1)));
}

document.addEventListener("keydown", (event) => {
  const { target, key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || target.matches("select")) return;
  if (key === "Escape") release();
  if (key === "n" && run.steps[state.step + 1]) chooseStep(state.step + 1);
  if (key === "p" && run.steps[state.step - 1]) chooseStep(state.step - 1);
  if (key === "Enter" && target === $("rows")) {
    event.preventDefault();
    state.held = !state.held;
  }
  if (MOVES[key] && target.closest("#rows")) {
    event.preventDefault();
    move(MOVES[key]);
  }
});
$("close").addEventListener("click", release);

/** The chart of the steps, of numbers alone; its axes are text beside it, which does not stretch. */
function drawStrip() {
  const fates = ["protected", "doubled", "filtered"];
  const { steps } = run;
  $("steps").hidden = steps.length < 2;
  const share = (step, fate) => step[fate] / Math.max(1, step.tokens);
  const shareOfAll = (step) => fates.reduce((sum, fate) => sum + share(step, fate), 0);
  const top = Math.max(1, Math.ceil(10 * Math.max(...steps.map(shareOfAll)))) / 10; // of the left axis, in tenths
  const rewards = steps.map((step) => step.reward);
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  const bars = steps.map((step, at) => {
    let bar = `<rect class="back" x="${at}" y="0" width="1" height="100"/>`;
    let y = 100; // parts stand on each other, from the bottom on
    for (const fate of fates) {
      const height = (100 * share(step, fate)) / top;
      y -= height;
      bar += `<rect class="${fate}" x="${at + 0.1}" y="${y}" width="0.8" height="${height}"/>`;
    }
    return `<g>${bar}</g>`;
  });
  const points = rewards.map((reward, at) => `${at + 0.5},${98 - (96 * (reward - low)) / (high - low || 1)}`);
  $("strip").setAttribute("viewBox", `0 0 ${steps.length} 100`);
  $("strip").innerHTML = `${bars.join("")}<polyline points="${points.join(" ")}"/>`;
  $("strip").querySelectorAll("g").forEach((bar, at) => bar.addEventListener("click", () => chooseStep(at)));
  const label = (id, ...texts) => $(id).replaceChildren(...texts.map((text) => make("span", {}, text)));
  label("strip-share", `${number(100 * top, 0)} %`, "0 %");
  label("strip-reward", ...(low === high ? ["", amount(low)] : [amount(high), amount(low)]));
  label("strip-steps", `step ${steps[0].step}`, `step ${steps.at(-1).step}`);
  $("step").max = steps.length - 1;
}

function goToStep(at) {
  const { step } = run.steps[at];
  state.step = at;
  $("step").value = at;
  $("step-name").textContent = step;
  $("step").setAttribute("aria-valuetext", `step ${step}`);
  $("strip").querySelectorAll("g").forEach((bar, i) => bar.classList.toggle("now", i === at));

  groups = readData(`step-${step}`).map(({ prompt, completions }) => ({
    prompt, completions: completions.map((record, number) => new Completion(record, number)),
  }));
  const conflicts = groups.map(hasConflict);
  const names = groups.map((group, number) => groupName(group, number, conflicts[number]));
  state.group = Math.max(0, conflicts.indexOf(true));
  $("group").replaceChildren(...names.map((name, number) => make("option", { value: number }, name)));
  $("group").value = state.group;

  const entropies = groups.flatMap(({ completions }) => completions.map((c) => c.trajectory_entropy ?? 0));
  $("threshold").max = Math.max(1.5 * run.gtpo.entropy_threshold, 1.05 * Math.max(...entropies));
  drawGroup();
}

function hasConflict({ completions }) {
  return completions.some((c) => c.lambda.some((x) => x !== 1));
}

function groupName(group, number, isShared) {
  const rewards = group.completions.map((c) => c.reward);
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  const range = low === high ? amount(low) : `${amount(low)} to ${amount(high)}`;
  const note = isShared ? "" : ", no conflict";
  return `${number + 1} of ${groups.length}: ${rewards.length} completions, reward ${range}${note}`;
}

/** Go to a step and keep it in the address, so that the page opens there again when it is reloaded. */
function chooseStep(at) {
  history.replaceState(null, "", `#${run.steps[at].step}`);
  goToStep(at);
}

$("step").addEventListener("input", (event) => chooseStep(Number(event.target.value)));
$("group").addEventListener("change", (event) => { state.group = Number(event.target.value); drawGroup(); });
$("colour").addEventListener("change", (event) => { state.colour = event.target.value; repaint(); });
$("threshold").addEventListener("input", ({ target }) => {
  state.threshold = target.valueAsNumber < Number(target.max) ? target.valueAsNumber : Infinity;
  repaint();
});

/** What the run is, and what its filter does. */
function runText() {
  const text = `${run.source}: ${run.rollouts || run.adv_estimator}, ${count(run.steps.length, "step")}. `;
  if (run.rollouts) return text;
  const initialEntropy = run.initial_entropy === null ? "unknown" : number(run.initial_entropy, 3);
  return `${text}Filter ${run.filter_active ? "on" : "off"}: completion_filter=${run.gtpo.completion_filter}, ` +
    `initial entropy ${initialEntropy}, threshold ${number(run.gtpo.entropy_threshold, 3)} nats per token.`;
}

/** How the page is to be taken, of a run that does not train with GTPO. */
function noticeText() {
  if (run.rollouts) {
    return `These are ${run.rollouts}: text, which this page tokenises again. Ends are unknown: special tokens are left out, ` +
      "so a completion that was cut off looks like one that ended by itself. A token may not be the " +
      "one that was sampled, and text that a tool wrote looks like the model's. The colours show what GTPO would do " +
      `with its default settings, without its filter; A is ${run.advantage}.`;
  }
  return `This run trains with ${run.adv_estimator}, not with GTPO. The colours show what GTPO would do ` +
    "to these tokens: the protected and doubled ones are those that this run pushes both ways. Advantages are the run's own.";
}

if (!applied) $("title").textContent = `What ${run.adv_estimator?.toUpperCase() ?? "a run"} does to each token, and what GTPO would do`;
$("run").textContent = runText();
$("notice").hidden = applied;
$("notice").textContent = noticeText();
for (const element of document.querySelectorAll("[data-lambda]")) {
  element.textContent = amount(run.gtpo[`conflict_weight_${element.dataset.lambda}`]);
}
for (const element of document.querySelectorAll(".needs-entropy")) element.hidden = Boolean(run.rollouts);
if (window.matchMedia("(max-width: 60rem)").matches) $("frequent").open = false;
drawStrip();
const placeOf = (wanted) => run.steps.findIndex(({ step }) => step === wanted);
for (const [since, meaning] of run.signs) {
  const button = make("button", { type: "button", onclick: () => chooseStep(placeOf(since)) }, `step ${since}`);
  $("signs").append(make("li", {}, "Since ", button, `: ${meaning}.`));
}
$("signs").hidden = !run.signs.length;
const wanted = placeOf(Number(location.hash.slice(1)));
const firstSign = run.signs.length ? placeOf(run.signs[0][0]) : 0;
goToStep(wanted >= 0 ? wanted : firstSign);
const isInferenceKnown = groups.some(({ completions }) => completions.some((c) => c.inference_logprobs));
for (const element of document.querySelectorAll(".needs-inference")) element.hidden = !isInferenceKnown;
