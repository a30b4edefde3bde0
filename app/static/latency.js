// Draws the charts of a latency page from its JSON: {charts: [{id, title, unit, kind, x_label,
// x_is_time, x, x_step, x_text, series: [{label, values}]}]}. The tables beside them say the same.
"use strict";

(() => {
  const SYMBOLS = ["\u25cf", "\u25a0", "\u25b2", "\u25c6", "\u2715"]; // tell lines apart without colour
  const DASHES = [[], [8, 5], [2, 4], [10, 4, 2, 4], [4, 3]];
  const HEIGHT = 240;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const seriesColour = (index) => colour(`--series-${(index % 5) + 1}`);
  const figure = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 4 });
  const clock = new Intl.DateTimeFormat(undefined, {
    month: "short",
    day: "numeric",
    hour: "2-digit",
    minute: "2-digit",
  });

  // A hatch per series: plain, rising, falling, dots, level.
  const hatch = (context, index) => {
    const size = Math.round(8 * devicePixelRatio);
    const tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const paint = tile.getContext("2d");
    paint.fillStyle = seriesColour(index);
    paint.fillRect(0, 0, size, size);
    paint.strokeStyle = paint.fillStyle = colour("--raised");
    paint.lineWidth = Math.max(1, size / 8);
    paint.beginPath();
    if (index % 5 === 1 || index % 5 === 2) {
      const sign = index % 5 === 1 ? 1 : -1;
      for (const shift of [-size, 0, size]) {
        paint.moveTo(shift, sign > 0 ? size : 0);
        paint.lineTo(shift + size, sign > 0 ? 0 : size);
      }
      paint.stroke();
    } else if (index % 5 === 3) {
      paint.arc(size / 2, size / 2, size / 5, 0, 7);
      paint.fill();
    } else if (index % 5 === 4) {
      paint.moveTo(0, size / 2);
      paint.lineTo(size, size / 2);
      paint.stroke();
    }
    return context.createPattern(tile, "repeat");
  };

  const axes = (chart) => {
    const common = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui, sans-serif",
    };
    const turns = (_, splits) => splits.map((at) => (Number.isInteger(at) ? String(at) : ""));
    return [
      { ...common, ...(chart.x_is_time ? {} : { values: turns, incrs: [1, 2, 5, 10, 20, 50, 100, 500] }) },
      { ...common, size: 64, values: (_, splits) => splits.map((value) => figure.format(value)) },
    ];
  };

  const xRange = (chart) => {
    const pad = chart.x_is_time ? chart.x_step : 0.6;
    return [chart.x[0] - pad, chart.x[chart.x.length - 1] + pad];
  };

  const xSeries = (chart) => ({
    label: chart.x_is_time ? "Time" : chart.x_label,
    value: (_, at) =>
      at === null ? "\u2013" : chart.x_is_time ? clock.format(new Date(at * 1000)) : String(at),
  });

  const says = (value) => (value === null || value === undefined ? "\u2013" : figure.format(value));

  const lineSeries = (chart) => (series, index) => ({
    label: `${SYMBOLS[index % 5]} ${series.label}`,
    stroke: seriesColour(index),
    width: chart.kind === "points" ? 0 : 2,
    paths: chart.kind === "points" ? () => null : undefined,
    dash: DASHES[index % 5],
    spanGaps: false,
    points: { show: false },
    value: (_, value) => says(value),
  });

  const drawSymbols = (chart) => (plot) => {
    const context = plot.ctx;
    context.save();
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${Math.round(11 * devicePixelRatio)}px sans-serif`;
    // Symbols of many points would hide the line; where there is none, all are needed.
    const sparse = chart.kind === "points" ? 1 : Math.ceil(chart.x.length / 60);
    chart.series.forEach((series, index) => {
      context.fillStyle = seriesColour(index);
      series.values.forEach((value, at) => {
        if (value === null || at % sparse) return;
        const left = plot.valToPos(chart.x[at], "x", true);
        context.fillText(SYMBOLS[index % 5], left, plot.valToPos(value, "y", true));
      });
    });
    context.restore();
  };

  // Bars are stacked: each is drawn from zero to the sum up to it, the highest first.
  const stack = (chart) => {
    const sums = [];
    let below = chart.x.map(() => 0);
    for (const series of chart.series) {
      below = below.map((sum, at) => sum + (series.values[at] ?? 0));
      sums.push(below);
    }
    return sums;
  };

  const barSeries = (chart) => (series, index) => ({
    label: series.label,
    stroke: seriesColour(index),
    width: 1,
    fill: (plot) => hatch(plot.ctx, index),
    paths: uPlot.paths.bars({ size: [0.6, 60, 3] }),
    points: { show: false },
    value: (plot, _, __, at) => (at === null || at === undefined ? "\u2013" : says(series.values[at])),
  });

  const draw = (holder, chart) => {
    const bars = chart.kind === "bars";
    const values = bars ? stack(chart) : chart.series.map((series) => series.values);
    const described = chart.series.map((bars ? barSeries : lineSeries)(chart));
    const options = {
      width: Math.max(200, holder.clientWidth),
      height: HEIGHT,
      class: bars ? "plot--bars" : "plot--lines",
      scales: {
        x: { time: chart.x_is_time, range: () => xRange(chart) },
        y: { range: (_, __, top) => [0, (top || 1) * 1.08] },
      },
      axes: axes(chart),
      series: [xSeries(chart), ...described],
      cursor: { drag: { x: false, y: false }, points: { show: !bars } },
      hooks: bars ? {} : { draw: [drawSymbols(chart)] },
    };
    if (bars) {
      // uPlot paints in order, so the whole stack comes first; its legend is turned by the style.
      options.series = [options.series[0], ...described.reverse()];
      values.reverse();
    }
    holder.replaceChildren();
    return new uPlot(options, [chart.x, ...values], holder);
  };

  const show = async (page) => {
    const response = await fetch(page.dataset.latencySrc, { headers: { Accept: "application/json" } });
    if (!response.ok) return; // the tables are there
    const { charts } = await response.json();
    const plots = [];
    const drawAll = () => {
      for (const { plot } of plots.splice(0)) plot.destroy();
      for (const chart of charts) {
        const holder = document.querySelector(`#chart-${CSS.escape(chart.id)} .chart__plot`);
        if (holder && chart.x.length) plots.push({ holder, plot: draw(holder, chart) });
      }
    };
    drawAll();
    dark.addEventListener("change", drawAll);
    new ResizeObserver(() => {
      for (const { holder, plot } of plots) {
        const width = Math.max(200, holder.clientWidth);
        if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
      }
    }).observe(page);
  };

  const page = document.getElementById("latency");
  if (page) show(page).catch(() => {}); // offline: the tables are there
})();
