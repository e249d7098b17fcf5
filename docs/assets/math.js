// Loads MathJax, which is part of the site, on pages that have equations.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex" },
  svg: { fontCache: "global" },
};
if (document.querySelector(".arithmatex")) {
  const base = document.currentScript.src.replace(/math\.js.*$/, "");
  const script = document.createElement("script");
  script.src = base + "tex-svg.js";
  document.head.appendChild(script);
}
