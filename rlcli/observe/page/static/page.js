"use strict";

// Puts the page together from its document.

async function readDocument() {
  const packed = document.getElementById("document").textContent;
  const compressed = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function show() {
  const page = await readDocument();
  followTheme();
  const curves = new Curves(page);
  const timeline = new Timeline(page);
  const sections = {
    Summary: summary(page),
    Curves: curves.nodes(),
    Responses: page.samples.length ? new Responses(page).nodes() : null,
    Timeline: timeline.nodes(),
    Time: time(page),
    Recipe: new Recipe(page).nodes(),
    "Repeat it": repetition(page),
  };
  const main = document.querySelector("main");
  main.replaceChildren();
  for (const [title, nodes] of Object.entries(sections)) {
    if (nodes == null) continue;
    const id = title.toLowerCase().replaceAll(" ", "-");
    main.append(element("section", { id }, element("h2", {}, title), ...nodes.filter((node) => node != null)));
    document.querySelector("nav").append(element("a", { href: `#${id}` }, title));
  }
  document.querySelector("footer").append(`written by rlcli ${page.rlcli}, ${page.written.replace("T", " ").slice(0, 16)} UTC`);
  curves.draw();
  timeline.draw();
  document.documentElement.dataset.ready = "";
}

show();
