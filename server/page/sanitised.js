// HTML that was made of a model's text, as nodes: DOMPurify lets a few elements and attributes through. No other module
// makes nodes of markup.

import "./dompurify/purify.min.js";

const purifier = globalThis.DOMPurify; // it is a script, which exports nothing
purifier.setConfig({
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    ..."a blockquote br code em h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul".split(" "), "#text",
  ],
  ALLOWED_ATTR: ["class", "dir", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, // of all attributes but title, class and these
  ADD_URI_SAFE_ATTR: ["dir", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
});

purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.localName === "a") {
    Object.assign(node, { title: node.href, target: "_blank", rel: "noopener noreferrer nofollow" });
  }
});

/** Return a fragment of the page's document. */
export const sanitised = (html) => purifier.sanitize(html);
