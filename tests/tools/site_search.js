// Asks the site's own search, as a browser does: node site_search.js SITE QUERY… prints a JSON list of pages for each
// query, best first. Material for MkDocs searches in a web worker; this file gives its script what a worker would have.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const SETUP = 0, READY = 1, QUERY = 2, RESULT = 3; // kinds of messages, as in Material's sources
const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf-8"));

let listener;
const found = [];
const worker = {
  addEventListener: (_, called) => (listener = called),
  postMessage: ({ type, data }) => {
    if (type === READY) worker.ready = true;
    if (type === RESULT) found.push(data.items.map(([page]) => page.location));
  },
  console, setTimeout, clearTimeout, URL, location: { href: "http://127.0.0.1/assets/javascripts/workers/" },
};
worker.self = worker;
vm.runInNewContext(fs.readFileSync(path.join(folder, script), "utf-8"), worker);

(async () => {
  const say = (type, data) => listener({ data: { type, data } });
  await say(SETUP, { ...index, options: { suggest: false } });
  for (const query of queries) await say(QUERY, query);
  console.log(JSON.stringify(found));
})();
