// @ts-check
/** Values at the axes of charts: pure functions. */

/** The time of a day, with parts of a second where it has some. @param {number} x - seconds */
export function clockTick(x) {
  const at = new Date(Math.round(1000 * x));
  const part = at.getMilliseconds();
  const text = at.toLocaleTimeString(undefined, { hourCycle: "h23" });
  return part ? `${text}.${String(part).padStart(3, "0").replace(/0+$/, "")}` : text;
}

/** Seconds as minutes and seconds, or hours, minutes and seconds: 75 is ``1:15``. @param {number} x */
export function spanTick(x) {
  const [sign, whole] = [x < 0 ? "-" : "", Math.round(10 * Math.abs(x)) / 10];
  const [hours, minutes, seconds] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), Math.round(10 * (whole % 60)) / 10];
  const last = `${seconds < 10 ? "0" : ""}${seconds}`;
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${last}` : `${sign}${minutes}:${last}`;
}

/** Distances between such values, in seconds. */
export const SPAN_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400,
  172_800, 604_800, 2_592_000];

/** Powers of ten, at most nine; with few of them also their multiples. @param {number} low @param {number} high */
export function logSplits(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((last - first) / 8));
  const digits = last - first > 2 ? [1] : last - first > 1 ? [1, 3] : [1, 2, 5];
  const found = [];
  for (let power = first; power <= last; power += every) {
    for (const digit of digits) {
      const value = Number(`${digit}e${power}`);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}
