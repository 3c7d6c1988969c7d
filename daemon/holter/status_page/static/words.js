// Numbers and times for people.

export const count = (number) => Number(number).toLocaleString("en");

export const ranks = (number) => `${count(number)} ${number === 1 ? "rank" : "ranks"}`;

export function figure(value) {
  if (value === null || value === undefined) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2).replace("e+", "e") : String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds < 0.0995) return `${Number((seconds * 1e3).toPrecision(2))} ms`;
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export function time(at) {
  const when = new Date(at);
  if (Number.isNaN(when.getTime())) return String(at);
  const isToday = when.toDateString() === new Date().toDateString();
  return isToday ? when.toLocaleTimeString("en-GB") : `${when.toLocaleDateString("en-CA")} ${when.toLocaleTimeString("en-GB")}`;
}
