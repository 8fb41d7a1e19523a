//! The synthetic load of a shared cluster over a day, in the manner of public clusters' traces.
//! Nights are calm with a wave of batch jobs, days are crowded, and neighbours' stays are
//! heavy-tailed. The seed determines everything.
//!
//! Each worker has a node. Neighbours arrive at it as a Poisson process; the expected number
//! present is ρ(t). They stay for a log-normal time (median [`STAY_SECONDS`], σ = [`STAY_SIGMA`]).
//! They demand a Pareto-distributed share of the node's cores (from [`LEAST_DEMAND`], shape
//! [`DEMAND_SHAPE`]). If the demands add up to d, the worker is 1 + d times slower, at most
//! [`MOST_SLOWDOWN`] times.
//!
//! ρ(t) is [`CALM`] at night, rises from 7:00 to [`CROWDED`] at 14:00 and falls until 21:00. From
//! 2:00 to 3:00 it is [`BATCH_WAVE`]. The training job sees the sum over its nodes.

use rectrain_random::SplitMix64;

pub const DAY_SECONDS: f64 = 86_400.0;
const HOUR: f64 = 3600.0;
const STAY_SECONDS: f64 = 300.0;
const STAY_SIGMA: f64 = 1.0;
const LEAST_DEMAND: f64 = 0.2;
const DEMAND_SHAPE: f64 = 1.5;
const MOST_SLOWDOWN: f64 = 6.0;
const CALM: f64 = 0.003;
const CROWDED: f64 = 0.35;
const BATCH_WAVE: f64 = 0.08;
/// Share of a node's CPU that a worker alone uses. A neighbour's demand of 1 adds as much.
const OWN_CPU: f64 = 0.45;

/// Standard normal (Box and Muller 1958).
fn normal(random: &mut SplitMix64) -> f64 {
    (-2.0 * random.positive_unit().ln()).sqrt() * (std::f64::consts::TAU * random.positive_unit()).cos()
}

/// A time in which a worker is slower by `factor`.
#[derive(Clone, Copy, Debug)]
pub struct Slow {
    pub from_seconds: f64,
    pub until_seconds: f64,
    pub factor: f64,
}

/// The day of one worker: times of slowness, in order and without overlap.
#[derive(Clone, Debug)]
pub struct Node {
    pub slow: Vec<Slow>,
}

impl Node {
    /// Factor by which its worker is slower at `seconds`.
    pub fn factor(&self, seconds: f64) -> f64 {
        let place = self.slow.partition_point(|slow| slow.until_seconds <= seconds);
        self.slow.get(place).filter(|slow| slow.from_seconds <= seconds).map_or(1.0, |slow| slow.factor)
    }

    /// Share of its CPU in use.
    pub fn cpu(&self, seconds: f64) -> f64 {
        (OWN_CPU * self.factor(seconds)).min(1.0)
    }
}

/// ρ(t).
fn neighbours(seconds: f64) -> f64 {
    let hour = seconds / HOUR;
    let day = if (7.0..21.0).contains(&hour) { (std::f64::consts::PI * (hour - 7.0) / 14.0).sin() } else { 0.0 };
    let wave = if (2.0..3.0).contains(&hour) { BATCH_WAVE } else { 0.0 };
    (CALM * (CROWDED / CALM).powf(day)).max(wave)
}

/// The nodes' days.
pub fn nodes(count: usize, seed: u64) -> Vec<Node> {
    (0..count as u64).map(|node| one(&mut SplitMix64::new(seed ^ node.wrapping_mul(0xD134_2543_DE82_EF95)))).collect()
}

fn one(random: &mut SplitMix64) -> Node {
    let mean_stay = STAY_SECONDS * (STAY_SIGMA * STAY_SIGMA / 2.0).exp();
    let most = CROWDED / mean_stay;
    // Thinning: candidates arrive at the highest rate, and each stays with the present share of it.
    let (mut now, mut stays) = (0.0, Vec::new());
    loop {
        now -= random.positive_unit().ln() / most;
        if now >= DAY_SECONDS {
            return Node { slow: slow_times(&stays) };
        }
        let (kept, stay) = (random.positive_unit(), STAY_SECONDS * (STAY_SIGMA * normal(random)).exp());
        let demand = LEAST_DEMAND * random.pareto(DEMAND_SHAPE);
        if kept * most <= neighbours(now) / mean_stay {
            stays.push((now, now + stay, demand));
        }
    }
}

/// Neighbours' demands, summed where their stays overlap.
fn slow_times(stays: &[(f64, f64, f64)]) -> Vec<Slow> {
    let mut times: Vec<f64> = stays.iter().flat_map(|(from, until, _)| [*from, *until]).collect();
    times.sort_by(f64::total_cmp);
    let between = times.windows(2).filter_map(|pair| {
        let (from_seconds, until_seconds) = (pair[0], pair[1]);
        let is_there = |stay: &&(f64, f64, f64)| stay.0 <= from_seconds && stay.1 >= until_seconds;
        let demand: f64 = stays.iter().filter(is_there).map(|stay| stay.2).sum();
        let slow = Slow { from_seconds, until_seconds, factor: (1.0 + demand).min(MOST_SLOWDOWN) };
        (demand > 0.0 && until_seconds > from_seconds).then_some(slow)
    });
    between.collect()
}
