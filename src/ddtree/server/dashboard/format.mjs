// Figures and tokens as a person reads them.

export const NONE = "–";

export function seconds(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)} s`;
  if (value >= 0.01) return `${Math.round(value * 1e3)} ms`;
  return `${(value * 1e3).toFixed(1)} ms`;
}

export function figure(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value >= 10 ? 1 : 2);
}

export function percent(share) {
  if (!Number.isFinite(share)) return NONE;
  return share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`;
}

export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

// A token with its white space made visible, at most `longest` characters.
export function token(text, longest = 12) {
  const seen = Array.from(String(text).replace(/ /g, "␣").replace(/\r?\n/g, "↵").replace(/\t/g, "⇥").replace(/\p{C}/gu, "�"));
  if (seen.length === 0) return "∅";
  return seen.length > longest ? `${seen.slice(0, longest - 1).join("")}…` : seen.join("");
}
