// A canvas that is as sharp as the screen and as large as the style sheet says.

/** Size the canvas to its box, in device pixels; returns a context in CSS pixels, cleared, and the box. */
export function prepare(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `value`: a scale that rarely changes. */
export function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
