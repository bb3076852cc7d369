//! Curves as a picture: panels side by side, each with steps on one axis and a scale from zero on the
//! other, so that what is flat looks flat.

use std::fmt::Write;

pub struct Panel {
    pub title: &'static str,
    /// What the steps count, with its unit.
    pub across: &'static str,
    pub steps: Vec<String>,
    /// What is counted upwards, with its unit.
    pub upwards: &'static str,
    pub series: Vec<Series>,
}

pub struct Series {
    pub name: &'static str,
    /// One for each step.
    pub points: Vec<f64>,
}

const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 356.0;
/// Around the drawing area of a panel.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
/// Room for the steps, their label and the names of the series.
const BOTTOM: f64 = 134.0;
/// Told apart also by those who do not see all colours.
const COLOURS: [&str; 5] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"];

pub fn svg(panels: &[Panel]) -> String {
    let width = WIDTH * panels.len() as f64;
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#222">
<rect width="100%" height="100%" fill="#fff"/>
"##
    );
    for (number, panel) in panels.iter().enumerate() {
        let _ = writeln!(
            out,
            r#"<g transform="translate({} 0)">"#,
            WIDTH * number as f64
        );
        draw(panel, &mut out);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn draw(panel: &Panel, out: &mut String) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let most = panel.series.iter().flat_map(|series| &series.points);
    let (tick, ticks) = scale(most.copied().fold(0.0, f64::max));
    let most = tick * f64::from(ticks);
    let x = |step: usize| {
        let gaps = panel.steps.len().max(2) - 1;
        LEFT + 12.0 + (right - LEFT - 24.0) * step as f64 / gaps as f64
    };
    let y = |value: f64| bottom - (bottom - TOP) * value / most;
    let mut text = |x: f64, y: f64, anchor: &str, more: &str, words: &str| {
        let _ = writeln!(
            out,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" {more}>{words}</text>"#
        );
    };
    let middle = f64::midpoint(LEFT, right);
    text(middle, 20.0, "middle", r#"font-weight="bold""#, panel.title);
    text(middle, bottom + 38.0, "middle", "", panel.across);
    let height = f64::midpoint(TOP, bottom);
    let turned = format!(r#"transform="rotate(-90 14 {height:.1})""#);
    text(14.0, height, "middle", &turned, panel.upwards);
    for (step, words) in panel.steps.iter().enumerate() {
        text(x(step), bottom + 18.0, "middle", "", words);
    }
    for number in 0..=ticks {
        let value = tick * f64::from(number);
        text(LEFT - 6.0, y(value) + 4.0, "end", "", &value.to_string());
    }
    for (number, series) in panel.series.iter().enumerate() {
        let colour = format!(r#"fill="{}""#, COLOURS[number % COLOURS.len()]);
        let y = bottom + 58.0 + 16.0 * number as f64;
        text(LEFT, y, "start", &colour, &format!("● {}", series.name));
    }
    for number in 0..=ticks {
        let y = y(tick * f64::from(number));
        let _ = writeln!(out, r##"<path d="M{LEFT} {y:.1}H{right}" stroke="#ddd"/>"##);
    }
    for (number, series) in panel.series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let points = series.points.iter().enumerate();
        let points: Vec<_> = points
            .map(|(step, value)| format!("{:.1},{:.1}", x(step), y(*value)))
            .collect();
        let _ = writeln!(
            out,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
            points.join(" ")
        );
        for point in &points {
            let (x, y) = point.split_once(',').unwrap_or_default();
            let _ = writeln!(
                out,
                r#"<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>"#
            );
        }
    }
}

/// The distance of ticks and how many there are, so that they are round and reach `most`.
fn scale(most: f64) -> (f64, u32) {
    let mut tick = 1.0;
    loop {
        for round in [1.0, 2.0, 5.0] {
            let count = (most / (tick * round)).ceil();
            if count <= 6.0 {
                return (
                    tick * round,
                    (1..6).find(|few| f64::from(*few) >= count).unwrap_or(6),
                );
            }
        }
        tick *= 10.0;
    }
}
