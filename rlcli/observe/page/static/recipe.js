"use strict";

// The recipe with its origins, and how to repeat the run.

class Recipe {
  constructor({ groups, differences }) {
    this.groups = groups;
    this.differences = differences;
    this.chosen = { group: 0, query: "", defaults: false };
    this.list = element("div");
  }

  nodes() {
    this.draw();
    return [this.changed(), this.controls(), this.list];
  }

  changed() {
    if (this.groups.length < 2) return null;
    return table(["what differs", ...this.groups.map((group) => group.label)],
      this.differences.map(({ key, set_to }) => [key, ...set_to.map((value) => value ?? "–")]));
  }

  controls() {
    const set = (name, value) => { this.chosen[name] = value; this.draw(); };
    const groups = this.groups.map((group, number) => [number, group.label]);
    return element("div", { class: "controls" },
      element("input", { type: "search", placeholder: "search keys, values and files", "aria-label": "search the recipe", oninput: (event) => set("query", event.target.value) }),
      groups.length > 1 ? select("runs", groups, (value) => set("group", Number(value))) : null,
      element("label", {}, element("input", { type: "checkbox", onchange: (event) => set("defaults", event.target.checked) }), "defaults too"));
  }

  draw() {
    const { group, query, defaults } = this.chosen;
    const rows = this.groups[group].recipe.filter((row) =>
      (defaults || !row[2].startsWith("default")) && row.join(" ").includes(query));
    this.list.replaceChildren(table(["key", "value", "set in"], rows.map(([key, value, origin]) =>
      [element("code", {}, key), element("code", {}, value), element("span", { class: "faint" }, origin)])));
  }
}

function repetition({ groups }) {
  return groups.flatMap((group) => [
    groups.length > 1 ? element("h3", {}, group.label) : null,
    element("pre", {}, group.command),
    table(["", ""], Object.entries(group.environment), ["name", ""]),
  ]);
}
