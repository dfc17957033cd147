// The visible texts of a page whose contrast is less than WCAG's AA asks for: text, ratio, place.
() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+(e-?\d+)?/g).map(Number);
    return text.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
  const channel = (value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    const rect = node.tagName === "text" ? node.parentNode.querySelector("rect") : null;
    const paint = rect ? getComputedStyle(rect).fill : getComputedStyle(node).backgroundColor;
    const own = parse(paint);
    return own[3] >= 1 ? own.slice(0, 3) : over(own, ground(node.parentElement));
  };
  const opacity = (node) => (node ? Number(getComputedStyle(node).opacity) * opacity(node.parentElement) : 1);

  const poor = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const words = texts.currentNode.data.trim();
    const box = node.getBoundingClientRect();
    const isShown = box.width > 1 && box.height > 1 && getComputedStyle(node).visibility === "visible";
    if (!words || !isShown || node.closest(":disabled, noscript, [hidden]")) continue;
    const style = getComputedStyle(node);
    const [r, g, b, a] = parse(node instanceof SVGElement ? style.fill : style.color);
    const below = ground(node);
    const ink = over([r, g, b, a * opacity(node)], below);
    const [light, dark] = [luminance(ink), luminance(below)].sort((one, other) => other - one);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) poor.push(`${words} ${ratio.toFixed(2)} ${node.tagName}.${node.className}`);
  }
  return poor;
}
