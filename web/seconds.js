/** Times as a person reads them. */

import { say } from "./words.js";

const MINUTE = 60;

/**
 * A measurement: "0.41", "12.3".
 * @param {number} seconds
 */
export function digits(seconds) {
  return seconds.toFixed(seconds < 10 ? 2 : 1);
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
