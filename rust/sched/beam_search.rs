//! Beam search as a function of numbers: which continuations go on, which are kept as answers, and when it is over.
//!
//! The rules are those of `transformers`, so that rankings and scores agree with it: candidates of all beams are ranked
//! by the sum of their log-probabilities; an end token among the best `width` of them makes an answer, whose score is
//! its sum divided by its length to the power of the length penalty; the best `width` others go on. Sums are `f32`, added
//! token by token, as they are there. Of equal sums the one of the earlier beam, then of the lower token id, comes first.

use super::request::FinishReason;

/// When a search ends although beams could go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EarlyStopping {
    /// As soon as there are as many answers as beams.
    Always,
    /// When there are, and the best beam scores no better than the worst of them at its present length.
    Heuristic,
    /// When there are, and the best beam can become no better than the worst of them: at its present length, or at the
    /// greatest one where the length penalty is above 0.
    Never,
}

/// What a client asks of a beam search.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BeamParams {
    /// Beams that go on after every step, and answers.
    pub width: u32,
    /// Exponent of the length by which an answer's sum is divided.
    pub length_penalty: f64,
    /// When the search ends.
    pub early_stopping: EarlyStopping,
}

/// An answer that a beam search found.
#[derive(Clone, PartialEq, Debug)]
pub struct Hypothesis {
    /// The generated tokens, with the end token.
    pub tokens: Vec<u32>,
    /// Sum of their log-probabilities.
    pub cum_logprob: f32,
    /// The sum divided by the length to the power of the length penalty.
    pub score: f32,
    /// `Stop` at an end token, `Length` otherwise.
    pub reason: FinishReason,
}

/// A beam of the next step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Continuation {
    /// The beam that it continues.
    pub(super) parent: usize,
    pub(super) token: u32,
    cum_logprob: f32,
}

/// The likeliest next tokens of a beam, with their log-probabilities.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidates<'a> {
    pub(super) tokens: &'a [i32],
    pub(super) logprobs: &'a [f32],
}

/// The state of one search. The tokens of the beams that go on are the caller's.
#[derive(Debug)]
pub(super) struct BeamSearch {
    params: BeamParams,
    max_tokens: u32,
    num_candidates: u32,
    /// Of the beams that go on, the best first. One at the beginning.
    cum_logprobs: Vec<f32>,
    /// The best first, at most `width`.
    hypotheses: Vec<Hypothesis>,
}

impl BeamSearch {
    /// `num_end_tokens`: tokens that end an answer. So many more candidates are looked at that `width` of them go on.
    pub(super) fn new(params: BeamParams, max_tokens: u32, num_end_tokens: usize) -> Self {
        let per_beam = u32::try_from(1 + num_end_tokens)
            .expect("end tokens are few")
            .max(2);
        Self {
            params,
            max_tokens,
            num_candidates: per_beam * params.width,
            cum_logprobs: vec![0.0],
            hypotheses: Vec::new(),
        }
    }

    pub(super) const fn width(&self) -> u32 {
        self.params.width
    }

    /// Candidates that are needed of every beam.
    pub(super) const fn num_candidates(&self) -> u32 {
        self.num_candidates
    }

    /// The answers, the best first; the search is over.
    pub(super) fn take_hypotheses(&mut self) -> Vec<Hypothesis> {
        std::mem::take(&mut self.hypotheses)
    }

    /// Takes a step. `generated`: the tokens of every beam so far, all equally many; `candidates`: what may follow them.
    /// Returns the beams that go on, the best first; none when the search is over.
    pub(super) fn advance(
        &mut self,
        generated: &[&[u32]],
        candidates: &[Candidates<'_>],
        is_end: impl Fn(u32) -> bool,
    ) -> Vec<Continuation> {
        let ranked = self.ranked(candidates);
        let len = u32::try_from(generated[0].len()).expect("answers are no longer than max_tokens") + 1;
        let is_last = len >= self.max_tokens;
        let width = self.params.width as usize;
        for one in ranked.iter().take(width) {
            let reason = match is_end(one.token) {
                true => FinishReason::Stop,
                false if is_last => FinishReason::Length,
                false => continue,
            };
            self.keep(*one, generated[one.parent], len, reason);
        }
        let goes_on = |one: &Continuation| !is_last && !is_end(one.token);
        let running: Vec<Continuation> = ranked.into_iter().filter(goes_on).take(width).collect();
        let is_over = running
            .first()
            .is_none_or(|best| self.is_over(best.cum_logprob, len));
        if is_over {
            return Vec::new();
        }
        self.cum_logprobs = running.iter().map(|one| one.cum_logprob).collect();
        running
    }

    /// The best `num_candidates` continuations of all beams, in order.
    fn ranked(&self, candidates: &[Candidates<'_>]) -> Vec<Continuation> {
        let mut all: Vec<Continuation> =
            Vec::with_capacity(candidates.iter().map(|row| row.tokens.len()).sum());
        for (parent, (row, before)) in candidates.iter().zip(&self.cum_logprobs).enumerate() {
            let continuations = row.tokens.iter().zip(row.logprobs);
            all.extend(continuations.map(|(token, logprob)| Continuation {
                parent,
                token: token.cast_unsigned(),
                cum_logprob: logprob + before,
            }));
        }
        let order = |a: &Continuation, b: &Continuation| {
            let by_sum = b.cum_logprob.total_cmp(&a.cum_logprob);
            by_sum.then((a.parent, a.token).cmp(&(b.parent, b.token)))
        };
        let wanted = self.num_candidates as usize;
        if all.len() > wanted {
            all.select_nth_unstable_by(wanted - 1, order);
            all.truncate(wanted);
        }
        all.sort_unstable_by(order);
        all
    }

    /// Keeps an answer if it is one of the best `width`; of equal scores the older one stays.
    fn keep(&mut self, last: Continuation, before: &[u32], len: u32, reason: FinishReason) {
        let score = last.cum_logprob / self.divisor(len);
        let at = self.hypotheses.partition_point(|other| other.score >= score);
        if at >= self.params.width as usize {
            return;
        }
        let mut tokens = Vec::with_capacity(before.len() + 1);
        tokens.extend_from_slice(before);
        tokens.push(last.token);
        let kept = Hypothesis {
            tokens,
            cum_logprob: last.cum_logprob,
            score,
            reason,
        };
        self.hypotheses.insert(at, kept);
        self.hypotheses.truncate(self.params.width as usize);
    }

    /// Whether the search ends although a beam with the sum `best` could go on from its length.
    fn is_over(&self, best: f32, len: u32) -> bool {
        if self.hypotheses.len() < self.params.width as usize {
            return false;
        }
        let reaches_end =
            self.params.early_stopping == EarlyStopping::Never && self.params.length_penalty > 0.0;
        let best = best / self.divisor(if reaches_end { self.max_tokens } else { len });
        let worst = self
            .hypotheses
            .last()
            .map_or(f32::NEG_INFINITY, |worst| worst.score);
        self.params.early_stopping == EarlyStopping::Always || best <= worst || best.is_nan()
    }

    fn divisor(&self, len: u32) -> f32 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "scores are f32, as those of the source are"
        )]
        let divisor = f64::from(len).powf(self.params.length_penalty) as f32;
        divisor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 9;

    fn search(width: u32, max_tokens: u32, length_penalty: f64, early_stopping: EarlyStopping) -> BeamSearch {
        let params = BeamParams {
            width,
            length_penalty,
            early_stopping,
        };
        BeamSearch::new(params, max_tokens, 1)
    }

    fn advance(
        search: &mut BeamSearch,
        generated: &[&[u32]],
        rows: &[(&[i32], &[f32])],
    ) -> Vec<(usize, u32)> {
        let rows: Vec<Candidates<'_>> = rows
            .iter()
            .map(|&(tokens, logprobs)| Candidates { tokens, logprobs })
            .collect();
        let running = search.advance(generated, &rows, |token| token == END);
        running.iter().map(|one| (one.parent, one.token)).collect()
    }

    #[test]
    fn an_end_token_beyond_the_best_is_no_answer() {
        let mut search = search(2, 8, 1.0, EarlyStopping::Always);
        let row: (&[i32], &[f32]) = (&[1, 2, 9, 3], &[-1.0, -2.0, -3.0, -4.0]);
        assert_eq!(advance(&mut search, &[&[]], &[row]), [(0, 1), (0, 2)]);
        assert!(search.take_hypotheses().is_empty());
    }

    #[test]
    fn an_answer_is_scored_by_its_length_and_the_others_go_on() {
        let mut search = search(2, 8, 2.0, EarlyStopping::Heuristic);
        let first: (&[i32], &[f32]) = (&[1, 2, 3, 4], &[-1.0, -1.5, -3.0, -4.0]);
        advance(&mut search, &[&[]], &[first]);
        let rows: [(&[i32], &[f32]); 2] = [
            (&[9, 5, 6, 7], &[-0.5, -1.0, -3.0, -4.0]),
            (&[5, 6, 7, 8], &[-0.75, -2.0, -3.0, -4.0]),
        ];
        assert_eq!(advance(&mut search, &[&[1], &[2]], &rows), [(0, 5), (1, 5)]);
        let answers = search.take_hypotheses();
        assert_eq!(
            (answers[0].tokens.as_slice(), answers[0].cum_logprob),
            ([1, 9].as_slice(), -1.5)
        );
        assert!((answers[0].score + 1.5 / 4.0).abs() < 1e-7 && answers[0].reason == FinishReason::Stop);
    }

    #[test]
    fn equal_sums_rank_by_beam_and_token() {
        let mut search = search(2, 8, 1.0, EarlyStopping::Heuristic);
        let row: (&[i32], &[f32]) = (&[7, 2, 4, 1], &[-1.0; 4]);
        assert_eq!(advance(&mut search, &[&[]], &[row]), [(0, 1), (0, 2)]);
        let rows: [(&[i32], &[f32]); 2] = [(&[5, 6, 7, 8], &[-1.0; 4]), (&[1, 2, 3, 4], &[-1.0; 4])];
        assert_eq!(advance(&mut search, &[&[1], &[2]], &rows), [(0, 5), (0, 6)]);
    }

    #[test]
    fn the_greatest_length_ends_every_beam() {
        let mut search = search(3, 1, 1.0, EarlyStopping::Never);
        let row: (&[i32], &[f32]) = (&[9, 2, 4, 1, 5, 6], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
        assert_eq!(advance(&mut search, &[&[]], &[row]), []);
        let reasons: Vec<FinishReason> = search.take_hypotheses().iter().map(|one| one.reason).collect();
        assert_eq!(
            reasons,
            [FinishReason::Stop, FinishReason::Length, FinishReason::Length]
        );
    }

    #[test]
    fn the_three_ways_to_stop_differ() {
        // After two steps there are two answers, and a beam whose sum is less but which may become longer.
        for (early_stopping, goes_on) in [
            (EarlyStopping::Always, false),
            (EarlyStopping::Heuristic, false),
            (EarlyStopping::Never, true),
        ] {
            let mut search = search(2, 100, 1.0, early_stopping);
            let first: (&[i32], &[f32]) = (&[1, 2, 3, 4], &[-1.0, -1.0, -3.0, -4.0]);
            advance(&mut search, &[&[]], &[first]);
            let rows: [(&[i32], &[f32]); 2] = [
                (&[9, 5, 6, 7], &[-0.5, -2.0, -3.0, -4.0]),
                (&[9, 6, 7, 8], &[-0.5, -2.0, -3.0, -4.0]),
            ];
            assert_eq!(
                !advance(&mut search, &[&[1], &[2]], &rows).is_empty(),
                goes_on,
                "{early_stopping:?}"
            );
        }
    }
}
