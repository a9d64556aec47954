"""The counters of heartbeats, by the names that Prometheus knows them by.

A name that ends with _total counts up from the process's start; any other is a value of the moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flows.view.run_view import ProcessView
from schemas.messages import Heartbeat

FORGOTTEN_S = 3600.0  # a process that has been silent for longer is left out
_LABELS = ("run", "role", "number")
_Names = Mapping[str, tuple[str, str]]  # by counter: the name for Prometheus, and its meaning

OF_ALL: _Names = {
    "idle_s": ("streamrl_process_idle_seconds_total", "Time that the process waited."),
    "cpu_s": ("streamrl_process_cpu_seconds_total", "Processor time of the process itself."),
    "work_s": ("streamrl_process_work_cpu_seconds_total", "The same, with its child processes."),
    "weights_cpu_s": ("streamrl_process_weights_cpu_seconds_total", "Processor time for coding weights."),
    "machine_cpu_s": ("streamrl_process_machine_cpu_seconds_total", "Processor time of all on its machine."),
    "dead_letters": ("streamrl_process_dead_letters_total", "Records that the process could not use."),
}
OF_ROLE: Mapping[str, _Names] = {
    "feeder": {
        "admitted": ("streamrl_feeder_admitted_samples_total", "Samples that were admitted."),
        "undispatched": ("streamrl_feeder_undispatched_samples", "Samples that no generator has yet."),
        "dispatched": ("streamrl_feeder_dispatched_samples", "Samples that generators have and make."),
        "generators": ("streamrl_feeder_generators", "Generators that the dispatcher knows."),
        "made_again": ("streamrl_feeder_repeated_samples_total", "Samples that had to be made again."),
        "by_deadline": ("streamrl_feeder_deadline_in_force", "1: samples are dispatched by a deadline."),
        "choices": ("streamrl_feeder_dispatch_plans_total", "Plans that the dispatch policy has made."),
        "choice_s": ("streamrl_feeder_dispatch_plan_seconds", "Time that the last plan took."),
        "ranker": ("streamrl_feeder_ranker_version", "Version of the length ranker."),
        "ranker_prompts": ("streamrl_feeder_ranker_prompts_total", "Prompts that its backbone has read."),
        "ranker_cpu_s": ("streamrl_feeder_ranker_cpu_seconds_total", "Processor time of its learning."),
    },
    "generator": {
        "made": ("streamrl_generator_samples_total", "Samples that were finished."),
        "tokens": ("streamrl_generator_tokens_total", "Tokens of finished samples."),
        "drawn": ("streamrl_generator_drawn_tokens_total", "Tokens that were drawn."),
        "drafted": ("streamrl_generator_drafted_tokens_total", "Tokens that were guessed (speculation)."),
        "accepted": ("streamrl_generator_accepted_tokens_total", "Those of them that were right."),
        "shared": ("streamrl_generator_shared_tokens_total", "Tokens of prompts not computed again."),
        "running": ("streamrl_generator_running_samples", "Samples that are being generated or scored."),
        "queued": ("streamrl_generator_queued_samples", "Samples that wait for a slot."),
        "busy_s": ("streamrl_generator_busy_seconds_total", "Time in which the engine drew tokens."),
        "slot_s": ("streamrl_generator_slot_seconds_total", "The same for each sample that ran then."),
        "full_s": ("streamrl_generator_full_seconds_total", "Of that time, all slots being taken."),
        "step_s": ("streamrl_generator_step_seconds", "Time of a step, by a line through measured ones ..."),
        "sample_s": ("streamrl_generator_step_sample_seconds", "... and the further time of each sample."),
        "failed_rewards": ("streamrl_generator_failed_rewards_total", "Rewards that failed."),
        "awaited_rewards": ("streamrl_generator_awaited_rewards_total", "Whole seconds of reward waits."),
        "version": ("streamrl_generator_weights_version", "Version of the weights that it generates with."),
        "installs": ("streamrl_generator_installs_total", "Versions of the weights that were installed."),
        "pause_s": ("streamrl_generator_install_pause_seconds_total", "Time that this held up samples."),
    },
    "trainer": {
        "trained": ("streamrl_trainer_samples_total", "Samples that were trained."),
        "trained_tokens": ("streamrl_trainer_tokens_total", "Tokens that were trained."),
        "held": ("streamrl_trainer_held_samples", "Samples that wait for their iteration."),
        "duplicates": ("streamrl_trainer_duplicate_samples_total", "Samples that came twice."),
        "skipped_steps": ("streamrl_trainer_skipped_steps_total", "Steps without a gradient."),
        "stored_pieces": ("streamrl_trainer_stored_pieces_total", "Pieces of weights that the store took."),
        "published": ("streamrl_trainer_published_version", "Newest version that is in the store."),
        "published_bytes": ("streamrl_trainer_published_bytes_total", "Bytes of what was published."),
        "whole_bytes": ("streamrl_trainer_whole_version_bytes", "Bytes of all weights of a version."),
        "version": ("streamrl_trainer_weights_version", "Version of the weights after its last step."),
    },
    "relay": {
        "version": ("streamrl_relay_weights_version", "Newest version that the site has."),
        "crossed": ("streamrl_relay_crossed_bytes_total", "Bytes that came from afar."),
        "lag_s": ("streamrl_relay_lag_seconds", "Age of the newest version when the site had it."),
    },
}  # fmt: skip


def process_figures(run: str, processes: Iterable[ProcessView]) -> Iterator[Metric]:
    """Yield the figures of all processes of a run that are not forgotten."""
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for process in processes:
        if not process.beat.is_last and process.silent_s < FORGOTTEN_S:
            labels = (run, process.beat.role, str(process.beat.number))
            for name, text, value in _figures(process):
                if (family := found.get(name)) is None:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    family = found[name] = kind(name, text, labels=_LABELS)
                family.add_metric(labels, value)
    yield from found.values()


def _figures(process: ProcessView) -> Iterator[tuple[str, str, float]]:
    """Yield name, meaning and value of each figure. Counters that are not known to us are left out."""
    beat, waited = process.beat, _waited_s(process.beat)
    yield "streamrl_process_silent_seconds", "Time since the last heartbeat.", process.silent_s
    yield "streamrl_process_waiting_seconds", "Time of the wait that it is in; 0 while it works.", waited
    counters = beat.counters | {"idle_s": beat.counters.get("idle_s", 0.0) + waited}
    for names in (OF_ALL, OF_ROLE.get(beat.role, {})):
        for counter, (name, text) in names.items():
            if counter in counters:
                yield name, text, counters[counter]


def _waited_s(beat: Heartbeat) -> float:
    return max(0.0, beat.sent_at - beat.since) if beat.waits_for else 0.0
