"use strict";

// Responses to look through: sorted, searched, before and after, coloured by token.

const SURPRISING = 4; // nats from which a token has the strongest colour
const RESPONSES_PER_PAGE = 20;

const ORDERS = {
  step: (a, b) => b.step - a.step,
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  longest: (a, b) => (b.length ?? 0) - (a.length ?? 0),
  advantage: (a, b) => Math.abs(b.advantage ?? 0) - Math.abs(a.advantage ?? 0),
};

class Responses {
  constructor(page) {
    this.page = page;
    this.chosen = { phase: "", step: "", group: "", order: "step", query: "", view: "each", colouring: "" };
    this.first = 0;
    this.list = element("div");
    this.count = element("span", { class: "faint" });
  }

  nodes() {
    this.draw();
    return [this.controls(), this.list, this.pager()];
  }

  controls() {
    const set = (name) => (value) => { this.chosen[name] = value; this.first = 0; this.draw(); };
    const distinct = (field) => [...new Set(this.page.samples.map((sample) => sample[field]))];
    const steps = distinct("step").sort((a, b) => a - b);
    const groups = this.page.groups.map((group, number) => [number, group.label]);
    return element("div", { class: "controls" },
      element("input", { type: "search", placeholder: "search prompts and responses", "aria-label": "search", oninput: (event) => set("query")(event.target.value) }),
      groups.length > 1 ? select("runs", [["", "all"], ...groups], set("group")) : null,
      select("phase", [["", "all"], ...distinct("phase").map((phase) => [phase, phase])], set("phase")),
      select("step", [["", "all"], ...steps.map((step) => [step, step])], set("step")),
      select("order", [["step", "latest step"], ["best", "highest reward"], ["worst", "lowest reward"],
        ["longest", "longest"], ["advantage", "largest advantage"]], set("order")),
      select("view", [["each", "each response"], ["change", "before and after"]], set("view")),
      this.colouring(set("colouring")));
  }

  /** A choice among what was recorded of tokens. */
  colouring(choose) {
    const names = { logprob: "log-prob", advantage: "advantage", version: "version" };
    const fields = { logprob: "token_logprobs", advantage: "token_advantages", version: "versions" };
    const recorded = Object.keys(fields).filter((name) => this.page.samples.some((sample) => sample[fields[name]]));
    if (!recorded.length) return null;
    return select("colour tokens by", [["", "nothing"], ...recorded.map((name) => [name, names[name]])], choose);
  }

  pager() {
    const turn = (pages) => () => { this.first += pages * RESPONSES_PER_PAGE; this.draw(); };
    this.back = element("button", { type: "button", onclick: turn(-1) }, "‹ back");
    this.next = element("button", { type: "button", onclick: turn(1) }, "next ›");
    const pager = element("div", { class: "controls" }, this.back, this.count, this.next);
    this.update();
    return pager;
  }

  matching() {
    const { phase, step, group, query, order, colouring } = this.chosen;
    const words = query.toLowerCase();
    const matches = (sample) =>
      (!colouring || sample.tokens) && (!phase || sample.phase === phase) && (step === "" || sample.step === Number(step)) &&
      (group === "" || sample.group === Number(group)) &&
      (!words || `${sample.prompt}\n${sample.response}`.toLowerCase().includes(words));
    return this.page.samples.filter(matches).sort(ORDERS[order]);
  }

  draw() {
    const samples = this.matching();
    this.entries = this.chosen.view === "each" ? samples : changes(samples);
    const shown = this.entries.slice(this.first, this.first + RESPONSES_PER_PAGE);
    this.list.replaceChildren(...shown.map((entry) => (Array.isArray(entry) ? change(entry, this.chosen.colouring) : response(entry, this.chosen.colouring))));
    this.update();
  }

  update() {
    const { length } = this.entries;
    const last = Math.min(this.first + RESPONSES_PER_PAGE, length);
    const left = this.page.samples_left_out;
    this.count.textContent = (length ? `${this.first + 1} to ${last} of ${length}` : "none") +
      (left ? `; ${left} of other steps are in samples.jsonl` : "");
    if (!this.back) return;
    this.back.disabled = this.first === 0;
    this.next.disabled = last >= length;
  }
}

/** The first and the last response to each prompt, where they differ. */
function changes(samples) {
  const ends = new Map();
  for (const sample of samples) {
    const name = JSON.stringify([sample.group, sample.run, sample.phase, sample.id, sample.number]);
    const [first, last] = ends.get(name) ?? [sample, sample];
    ends.set(name, [sample.step < first.step ? sample : first, sample.step > last.step ? sample : last]);
  }
  return [...ends.values()].filter(([first, last]) => first.response !== last.response);
}

function change([before, after], colouring) {
  return element("article", { class: "response" }, facts(after, []),
    element("p", { class: "text prompt" }, before.prompt),
    element("div", { class: "sides" }, [before, after].map((sample) =>
      element("div", {}, facts(sample, ["step", "reward"]), written(sample, colouring)))));
}

function response(sample, colouring) {
  return element("article", { class: "response" }, facts(sample, ["step", "reward", "measures"]),
    element("p", { class: "text prompt" }, sample.prompt), written(sample, colouring),
    sample.reason ? element("p", { class: "faint" }, sample.reason) : null);
}

function facts(sample, kinds) {
  const reward = sample.reward == null ? null : element("b", { class: sample.reward > 0 ? "good" : "bad" }, `reward ${short(sample.reward)}`);
  const parts = {
    reward: [reward],
    step: [`step ${sample.step}`, sample.phase],
    measures: [
      sample.advantage == null ? null : `advantage ${short(sample.advantage)}`,
      sample.length == null ? null : `${sample.length} tokens`,
      sample.logprob == null ? null : `log-prob ${short(sample.logprob)}`,
      sample.finish === "length" ? "cut off at the limit" : null,
    ],
  };
  const row = [`row ${sample.id}`, sample.answer == null ? null : `answer ${sample.answer}`];
  const texts = [...kinds.flatMap((kind) => parts[kind]), ...(kinds.length === 2 ? [] : row)];
  return element("div", { class: "facts" }, texts.filter((text) => text != null).map((text) => element("span", {}, text)));
}

/** A response; of several turns, each with what was observed after it. `colouring`: what its tokens
 *  are coloured by, if they were recorded. */
function written(sample, colouring) {
  if (colouring && sample.tokens) return element("div", { class: "text" }, coloured(sample, colouring));
  const turns = sample.turns ?? [{ sampled: true, text: sample.response }];
  const rewards = [...(sample.turn_rewards ?? [])];
  return element("div", { class: "text" }, turns.map(({ sampled, text, repeated }) => {
    const kind = repeated == null ? "observed" : "rewritten";
    if (!sampled) return element("div", { class: "observed", title: kind }, text.trim());
    const reward = rewards.shift();
    return element("div", {}, text, reward == null ? null : element("span", { class: "faint" }, `  reward ${short(reward)}`));
  }));
}

/** A span for each token, with its numbers as a tooltip. */
function coloured({ tokens, token_logprobs, token_advantages, versions, turns }, colouring) {
  const sampled = turns?.flatMap((turn) => Array(turn.tokens).fill(turn.sampled)) ?? tokens.map(() => true);
  const of_tokens = versionsOf(versions, sampled);
  const oldest = Math.min(...of_tokens.filter((version) => version != null));
  const largest = Math.max(...(token_advantages ?? []).map((advantage) => Math.abs(advantage ?? 0)), 1e-9);
  return tokens.map((text, at) => {
    if (!sampled[at]) return element("span", { class: "observed", title: "observed" }, text);
    const [logprob, advantage, version] = [token_logprobs?.[at], token_advantages?.[at], of_tokens[at]];
    const facts = { "log-prob": logprob, advantage, version };
    const known = Object.entries(facts).filter(([, value]) => value != null);
    const span = element("span", { class: "token", title: known.map(([name, value]) => `${name} ${short(value)}`).join(", ") }, text);
    span.style.backgroundColor = {
      logprob: () => tint("--accent", Math.min(-(logprob ?? 0) / SURPRISING, 1)),
      advantage: () => tint(advantage < 0 ? "--bad" : "--good", Math.abs(advantage ?? 0) / largest),
      version: () => (version == null ? "" : `${colour(version - oldest)}55`),
    }[colouring]();
    return span;
  });
}

/** The version of each token; observed ones have none. */
function versionsOf(versions, sampled) {
  const of_sampled = (versions ?? []).flatMap(([version, count]) => Array(count).fill(version));
  return sampled.map((is_sampled) => (is_sampled ? of_sampled.shift() : null));
}

/** A colour of the theme, as strong as a share of 1. */
function tint(name, share) {
  const strength = Math.round(share * 0x99).toString(16).padStart(2, "0");
  return `${style(name)}${strength}`;
}
