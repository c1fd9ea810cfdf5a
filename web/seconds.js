/** Times as a person reads them. */

import { language, say } from "./words.js";

const MINUTE = 60;

/**
 * A measurement: "0.41", "12.3".
 * @param {number} seconds
 */
export function digits(seconds) {
  return fixed(seconds, seconds < 10 ? 2 : 1);
}

/**
 * With so many digits behind the point, or comma, of the user's language.
 * @param {number} number
 * @param {number} places
 */
export function fixed(number, places) {
  return number.toLocaleString(language(), { minimumFractionDigits: places, maximumFractionDigits: places, useGrouping: false });
}

/**
 * A time that was taken: to a tenth of a second up to a minute.
 * @param {number} time
 */
export function tenths(time) {
  return time < MINUTE ? say("time.seconds", { seconds: fixed(time, 1) }) : duration(time);
}

/**
 * A wait in one number: "8 s", "4 min".
 * @param {number} seconds
 */
export function short(seconds) {
  return seconds < 2 * MINUTE ? duration(seconds) : say("time.about", { minutes: Math.round(seconds / MINUTE) });
}

/**
 * A time of day, with its date if that is another day.
 * @param {number} at seconds of the epoch
 */
export function moment(at) {
  const [time, today] = [new Date(at * 1000), new Date()];
  const same = time.toDateString() === today.toDateString();
  return same ? time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : time.toLocaleDateString();
}

/**
 * A wait: "8 s", "2 min 5 s".
 * @param {number} seconds
 */
export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < MINUTE) return say("time.seconds", { seconds: whole });
  return say("time.minutes", { minutes: Math.floor(whole / MINUTE), seconds: whole % MINUTE });
}
