// Pictures for the next message: chosen, dropped or pasted. A model that reads text only gets none.

import { bytes, find, make, say } from "../dom.js";
import { learn, sees } from "./model.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const READS_TEXT = "This model reads text only, so it gets no pictures.";
const NOT_KNOWN = "The fleet has not said yet whether its model sees pictures. Try again.";

let attached = [];

export function startPictures() {
  const [chat, files] = [find("view-chat"), find("files")];
  files.accept = KINDS.join();
  files.onchange = () => (attach([...files.files]), (files.value = ""));
  find("attach").onclick = () => files.click();
  chat.addEventListener("paste", (event) => take(event, event.clipboardData));
  chat.addEventListener("drop", (event) => take(event, event.dataTransfer));
  chat.addEventListener("dragover", (event) => mark(event, event.dataTransfer.types.includes("Files")));
  for (const gone of ["dragleave", "drop"]) chat.addEventListener(gone, (event) => mark(event, false));
}

/** The message's content: its text, or the parts of OpenAI's API. Nothing stays attached. */
export function withPictures(text) {
  const parts = attached.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  attached = [];
  show();
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}

/** What a message shows. */
export function contentNodes(content) {
  if (typeof content === "string") return [content];
  const pictures = content.filter(({ type }) => type === "image_url");
  const shown = pictures.map(({ image_url }) => make("img", { src: image_url.url, alt: "attached picture" }));
  const text = textOf(content);
  return [make("div", { className: "pictures" }, ...shown), ...(text ? [make("span", {}, text)] : [])];
}

export function textOf(content) {
  return typeof content === "string" ? content : (content.find(({ type }) => type === "text")?.text ?? "");
}

function mark(event, isOver) {
  if (isOver) event.preventDefault();
  find("view-chat").classList.toggle("over", isOver && sees() === true);
}

async function take(event, { files }) {
  if (!files.length) return;
  event.preventDefault();
  const given = [...files];
  await learn();
  attach(given);
}

async function attach(files) {
  if (!sees()) return say(find("attach-says"), sees() === null ? NOT_KNOWN : READS_TEXT);
  const [pictures, others] = [files.filter(isPicture), files.filter((file) => !isPicture(file))];
  const read = await Promise.all(pictures.map(async (file) => ({ file, url: await dataUrl(file) })));
  attached.push(...read);
  show();
  if (others.length) say(find("attach-says"), `No picture of a kind that is read: ${names(others)}`);
  find("words").focus();
}

const isPicture = (file) => KINDS.includes(file.type);
const names = (files) => files.map(({ name }) => name).join(", ");

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  say(find("attach-says"), "");
  find("attached").hidden = !attached.length;
  find("attached").replaceChildren(...attached.map(thumbnail));
}

function thumbnail(one) {
  const { name, size } = one.file;
  const remove = make("button", { type: "button", "aria-label": `Remove ${name}` }, "×");
  remove.onclick = () => {
    attached = attached.filter((other) => other !== one);
    show();
    find("attach").focus();
  };
  return make("li", { title: `${name}, ${bytes(size)}` }, make("img", { src: one.url, alt: name }), remove);
}

/** Whether there is something to send besides words. */
export const hasPictures = () => attached.length > 0;
