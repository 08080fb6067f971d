// A button that starts something, and the one in its place that stops it. The focus goes from one to the other.

export function swap(start, stop, busy) {
  const focused = document.activeElement === start || document.activeElement === stop;
  start.hidden = busy;
  stop.hidden = !busy;
  if (focused) (busy ? stop : start).focus();
}
