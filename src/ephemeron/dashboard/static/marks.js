// Marks of a timeline: shapes as in the report, so that they can be told apart without colour.
import { colour } from "./dom.js";

export const SHAPES = { fault: "injected fault", bad: "ended badly", replacement: "replacement", relay: "relay", resume: "resumed", duplicate: "duplicate", generation: "generation", resumed: "run resumed" };

const PATHS = {
  relay: [[["arc", 3.2]], "hollow"],
  replacement: [[[0, -5], [5, 0], [0, 5], [-5, 0]], "solid"],
  duplicate: [[[-3.2, -3.2], [3.2, -3.2], [3.2, 3.2], [-3.2, 3.2]], "hollow"],
  resume: [[[-3.5, -4.5], [4.5, 0], [-3.5, 4.5]], "solid"],
  fault: [[[1.5, -7], [-4, 1], [-0.5, 1], [-1.5, 7], [4, -1.5], [0.7, -1.5], [2.4, -7]], "spark"],
  generation: [[[-3, -6], [5, -2], [-3, 2], [-3, 7]], "solid"],
  resumed: [[[-3, -6], [5, -2], [-3, 2], [-3, 7]], "solid"],
};

export function drawMark(c, kind, x, y, size) {
  c.save();
  c.translate(x, y); c.scale(size, size);
  if (kind === "bad") {
    for (const [style, width] of [[colour("card"), 5], [colour("bad"), 2.2]]) {
      c.strokeStyle = style; c.lineWidth = width;
      c.beginPath(); c.moveTo(-4, -4); c.lineTo(4, 4); c.moveTo(-4, 4); c.lineTo(4, -4); c.stroke();
    }
    c.restore();
    return;
  }
  const [points, style] = PATHS[kind] || PATHS.relay;
  c.beginPath();
  if (points[0][0] === "arc") c.arc(0, 0, points[0][1], 0, 7);
  else { points.forEach(([px, py], i) => (i ? c.lineTo(px, py) : c.moveTo(px, py))); c.closePath(); }
  c.lineWidth = 1.4;
  c.fillStyle = { hollow: colour("card"), solid: colour("ink"), spark: colour("bad") }[style];
  c.strokeStyle = style === "hollow" ? colour("ink") : colour("card");
  if (style !== "hollow") c.stroke();
  c.fill();
  if (style === "hollow") c.stroke();
  c.restore();
}
