"use strict";

// Light and dark, and the colours of both.

const COLOURS = {
  light: ["#1f5fa8", "#c8553d", "#2f7d4f", "#8a5aa8", "#a06a00", "#3f8f94", "#b0487a", "#555f6b"],
  dark: ["#79b0f0", "#f0907c", "#74cf9a", "#c79be0", "#e0b050", "#7ccfd4", "#ee93bd", "#a9b4c0"],
};

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme;
}

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  document.dispatchEvent(new Event("theme"));
}

function followTheme() {
  useTheme(prefersDark.matches ? "dark" : "light");
  prefersDark.addEventListener("change", () => useTheme(prefersDark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click",
    () => useTheme(theme() === "dark" ? "light" : "dark"));
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(number) {
  return COLOURS[theme()][number % COLOURS.light.length];
}
