"use strict";
// Shows moment after moment. All HTML comes from Python: `pieces`, which frames refer to by number.
(() => {
  const show = JSON.parse(document.getElementById("show").textContent);
  const byId = (id) => document.getElementById(id);
  const [says, slider, play, speed] = ["says", "slider", "play", "speed"].map(byId);
  const join = (numbers) => numbers.map((number) => {
    const [piece, count] = Array.isArray(number) ? number : [number, 1]; // a pair stands for so many equal ones
    return show.pieces[piece].repeat(count);
  }).join("");
  const last = show.moments.length - 1;
  let now = 0;
  let timer = null;

  const runs = [...document.querySelectorAll(".run")].map((element) => ({
    element,
    panels: show.panels.map((name) => element.querySelector(`[data-panel=${name}]`)),
    cursor: element.querySelector(".cursor"),
    frame: null,
  }));

  function draw(run, frames, number, done) {
    run.element.classList.toggle("done", Boolean(done));
    if (run.frame === number) return;
    const [panels, [left, width]] = frames[number];
    panels.forEach((numbers, place) => { run.panels[place].innerHTML = join(numbers); });
    run.cursor.style.left = `${left}%`;
    run.cursor.style.width = `${width}%`;
    run.frame = number;
  }

  function go(number) {
    now = Math.min(Math.max(number, 0), last);
    const [text, frames, done] = show.moments[now];
    runs.forEach((run, place) => draw(run, show.runs[place], frames[place], done[place]));
    says.innerHTML = join(text);
    slider.value = now;
    slider.setAttribute("aria-valuetext", says.textContent);
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
    says.setAttribute("aria-live", "polite");
  }

  function tick() {
    if (now >= last) return pause();
    go(now + 1);
    timer = setTimeout(tick, 1000 / Number(speed.value));
  }

  function toggle() {
    if (timer !== null) return pause();
    if (now >= last) go(0);
    play.textContent = "Pause";
    says.setAttribute("aria-live", "off"); // nobody can listen that fast
    timer = setTimeout(tick, 1000 / Number(speed.value));
  }

  const step = (by) => { pause(); go(now + by); };
  const jump = (by) => {
    pause();
    const there = by > 0 ? show.jumps.find((number) => number > now) : show.jumps.findLast((number) => number < now);
    if (there !== undefined) go(there);
  };
  const actions = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), " ": toggle, n: () => jump(1), p: () => jump(-1),
    Home: () => step(-last), End: () => step(last),
  };

  byId("back").onclick = actions.ArrowLeft;
  byId("on").onclick = actions.ArrowRight;
  byId("back-event").onclick = actions.p;
  byId("on-event").onclick = actions.n;
  play.onclick = toggle;
  slider.oninput = () => { pause(); go(Number(slider.value)); };
  runs.forEach((run, place) => {
    run.element.querySelector(".strip").onclick = (event) => {
      const track = run.element.querySelector(".track").getBoundingClientRect();
      const number = 1 + Math.floor((event.clientX - track.left) / track.width * (show.runs[place].length - 1));
      const there = show.moments.findIndex(([, frames]) => frames[place] === number);
      if (there >= 0) { pause(); go(there); }
    };
  });
  let typed = false; // with the arrow keys one goes through the speeds; after a click the keys are to step again
  speed.onkeydown = () => { typed = true; };
  speed.onpointerdown = () => { typed = false; };
  speed.onchange = () => { if (!typed) speed.blur(); };
  for (const button of document.querySelectorAll(".controls button")) { // after a click, space is to play again
    button.addEventListener("click", (event) => event.detail && button.blur());
  }
  document.addEventListener("keydown", (event) => {
    const tag = event.target.tagName;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key; // caps lock
    const own = tag === "SELECT" || (tag === "BUTTON" && event.key === " "); // what the element does with the key
    if (own || event.ctrlKey || event.altKey || event.metaKey || !(key in actions)) return;
    event.preventDefault();
    if (key !== " " || !event.repeat) actions[key](); // held, space would play and pause in turn
  });
  go(0);
})();
