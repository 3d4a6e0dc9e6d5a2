"""A session: target and draft, loaded once, with their contexts; it answers one prompt after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from moeedge.engine import loading
from moeedge.engine.answer import Answer, Generation, ParallelGeneration
from moeedge.engine.context_choice import context_size, setting_notes, unmet_budget, usable_budget
from moeedge.engine.drafts import (
    ContextDraft,
    DraftSource,
    ModelDraft,
    NgramDraft,
    Script,
    ScriptedDraft,
    ScriptedSampler,
)
from moeedge.engine.grammar import new_sampler
from moeedge.engine.head_draft import HeadDraft
from moeedge.engine.layer_choice import LayerChoice
from moeedge.engine.loading import ChosenDraft
from moeedge.engine.probe import take_notes
from moeedge.engine.speculative import Recover, SpeculativeLoop, TextState
from moeedge.engine.types import DEFAULT_GAMMA, EngineConfig, EngineInfo, SamplingConfig
from moeedge.errors import BackendError, ContextTooSmallError, DeviceFailedError, EmptyPromptError, InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.host import cores_next_to_gpu, physical_cores
from moeedge.llama.context import Context
from moeedge.llama.dense_weights import let_experts_read_ahead
from moeedge.llama.gguf_file import adapts_experts
from moeedge.llama.model import Mode, Model
from moeedge.llama.reasoning import MODEL_TEMPLATE, TemplateChoice, begins_in_reasoning
from moeedge.llama.samplers import Grammar
from moeedge.llama.sequence import Cancelled
from moeedge.native.backends import MemoryUse
from moeedge.native.sensor import Counts
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.records import filled
from moeedge.run import Closing, Level, Run
from moeedge.scheduler import ram_tier
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.governor import GAMMA_MAX, DraftGovernor
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.opening import POSTPONED, Opening, check_policy
from moeedge.scheduler.stats import PlacementStats, StepRecord

# a prompt must leave room for an answer; llama.cpp's programs ask for the same
RESERVED_TOKENS = 4
_TAG_TOKENS = 32  # in which a tag of reasoning at the end of a prompt is looked for


@dataclass(eq=False, repr=False)
class Session(Closing):
    """The loaded models with their contexts and placement. Made by `Session.open`; a context manager.

    gamma: the draft length, may be changed between answers (0: plain decoding). governor: chooses each step's length up
    to `gamma`; None: all have that length (`set_draft_length`). n_keep: tokens at the start that a context shift never
    drops, e.g. the system message. template: the chat template of the prompts, which says how reasoning in answers is
    marked. observers: called with (StepRecord, Session) in each step's observe phase, prefill included (n_verified 0);
    of a step of several texts with their sums. placement: places experts; None without a device. layer_choice: how a
    GPU was divided between whole layers and cache; None where there was no choice. run: shows what takes a while; its
    notes are those of `info`. Only the answers that began last go on: earlier ones raise EngineError.
    """

    config: EngineConfig
    target: Context
    draft: DraftSource
    info: EngineInfo
    placement: PlacementManager | None
    calibration: Calibration | None
    _chosen: ChosenDraft
    _resources: ExitStack
    run: Run

    def __post_init__(self) -> None:
        self.gamma = self.info.gamma
        self.governor = self._new_governor() if self.info.auto_gamma else None
        self.n_keep = 1 if self.target.model.adds_bos else 0
        self.template = MODEL_TEMPLATE
        self.observers: list[Callable[[StepRecord, Session], None]] = []
        self.layer_choice: LayerChoice | None = None
        self.script: Script | None = None  # of the next answers; None: they are the model's own
        self._loop: SpeculativeLoop | None = None
        if self.placement is not None:
            self.placement.run = self.run

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        *,
        model: Model | None = None,
        draft_model: Model | None = None,
        run: Run | None = None,
    ) -> Session:
        """Loads the models, or shares those given, and opens contexts and placement. Raises MoeedgeError."""
        check_policy(config.placement)
        run = Run() if run is None else Run(run.show)  # opening is not cancelled
        device = loading.resolve_device(config, model)
        if device.ram_alone:
            ram_tier.check_policy(config.placement.policy)
        if config.auto_gamma and config.gamma > 0:
            config = replace(config, gamma=GAMMA_MAX)
        if "no-sd" in config.placement.ablations and config.mode == "moeedge":
            config = replace(config, gamma=0)
        if model is not None or draft_model is not None:  # which `_fall_back` would free
            config = replace(config, cpu_fallback=False)
        if config.n_threads == 0 and device.kind == "gpu" and config.mode == "moeedge":
            config = replace(config, n_threads=cores_next_to_gpu())
            if config.n_threads < physical_cores():
                run.note(f"{config.n_threads} threads compute (-t); the other cores feed {device.label}.")
        with ExitStack() as stack:
            model = model or stack.enter_context(loading.load_target(config, device))
            if config.n_parallel > 1 and not model.can_roll_back:
                problem = f"{model.info.architecture} models cannot decode several texts in one batch."
                raise InputError(problem, "Leave out --parallel.")
            if model.info.n_experts == 0:
                run.note(f"{config.model.name} is a dense model: it has no experts to cache.")
            elif isinstance(config.ram, int) and device.kind != "none" and not device.loads_misses:
                run.warn(f"--ram has no effect: {device.label} holds the model, or it was loaded without --ram.")
            chosen = loading.choose_draft(config, device, model, draft_model, run, stack)
            models = [model] if chosen.model is None else [model, chosen.model]
            n_ctx = context_size(config, device, models, run)
            has_budget = config.expert_budget is not None and config.mode == "moeedge"  # stock mode has none
            target = stack.enter_context(loading.make_context(config, model, n_ctx, has_budget=has_budget))
            run.notes.extend([*take_notes(loading.files_of(config)), *setting_notes(config, target)])
            draft = loading.open_draft(config, chosen, target, stack)
            gamma = 0 if chosen.name == "none" else _at_most(config.gamma, target.n_drafts_max)
            wanted, n_texts = config.expert_budget if has_budget else None, config.n_parallel
            budget, notes = usable_budget(wanted, model.info, gamma=gamma, draft=chosen.name, n_parallel=n_texts)
            run.notes.extend(notes)
            usual_gamma = min(gamma, DEFAULT_GAMMA) if config.auto_gamma else gamma
            placement, calibration = _open_placement(config, device, target, draft, (usual_gamma, gamma), run)
            if model.dense is not None and (placement is None or not placement.loads_on_demand):
                let_experts_read_ahead(model.path)
            if placement is not None:
                stack.callback(placement.close)
            if budget is not None:
                target.set_budget(budget)
            info = filled(
                EngineInfo,
                *(model.info, target, model),
                model=config.model.name,
                gamma=gamma,
                draft=chosen.name,
                notes=run.notes,
                expert_budget=budget,
                earlier_runs=placement.earlier_runs if placement is not None else None,
                auto_gamma=gamma > 0 and bool(config.auto_gamma),
                **_cache_fields(placement),
            )
            return cls(config, target, draft, info, placement, calibration, chosen, stack.pop_all(), run)

    @property
    def model(self) -> Model:
        return self.target.model

    @property
    def draft_context(self) -> Context | None:
        """The context of a draft model; None without, and for a draft head, whose context only `draft` uses."""
        return self.draft.context if isinstance(self.draft, ModelDraft) else None

    @property
    def counts(self) -> Counts | None:
        """Activations of the last verification or prefill, uint32 [n_layers, n_experts]; None for a dense model."""
        return self._loop.counts if self._loop is not None else None

    def set_expert_budget(self, budget: ExpertBudget | None) -> None:
        """Limits the experts of later verifications; None: no limit. Between answers.

        Raises InputError if the budget does not suit the model, and ValueError where the session began without one.
        """
        self.target.set_budget(budget)
        self.target.clear()  # what verifications under another budget left there is not exact
        self.info = replace(self.info, expert_budget=budget)

    def set_draft_length(self, gamma: int | Literal["auto"]) -> None:
        """Sets the draft length of the next answers, as far as the model and its head have so many drafts."""
        if gamma != "auto":
            self.gamma, self.governor = _at_most(_at_most(gamma, self.target.n_drafts_max), self._head_drafts_max), None
        elif self.governor is None:
            self.gamma, self.governor = GAMMA_MAX, self._new_governor()

    @property
    def _head_drafts_max(self) -> int | None:
        return self.draft.kind.n_drafts_max if isinstance(self.draft, HeadDraft) else None

    def _new_governor(self) -> DraftGovernor:
        info = self.model.info
        return DraftGovernor(
            max(1, _at_most(GAMMA_MAX, self.target.n_drafts_max)),
            own_max=self._head_drafts_max,
            n_experts=info.n_experts,
            n_used=info.n_expert_used,
            n_texts=self.config.n_parallel,
        )

    def follow(self, script: Script | None, repetition: int = 0) -> None:
        """The next answers follow the script; recorded routing begins at another row in each repetition."""
        self.script = script
        if self.target.routing is not None:
            self.target.routing.text = None if script is None else script.text
            self.target.routing.offset = self.target.routing.recorded.offset(repetition)

    def set_mode(self, mode: Mode) -> None:
        """Switches between moeedge's backend and stock llama.cpp, for comparisons within one process."""
        if self.placement is not None:
            self.placement.pause(mode == "stock")
        self.target.set_mode(mode)
        if self.draft_context is not None:
            self.draft_context.set_mode(mode)

    def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        n_predict: int = -1,
        sampling: SamplingConfig,
        run: Run | None = None,
        ignore_eos: bool = False,
        begun: Sequence[int] = (),
    ) -> Generation:
        """Answers `prompt_tokens`, except those at their start that the KV caches still hold from the last call.

        n_predict: maximum number of tokens, -1: until the model stops. run: asked between steps and between the
        pieces of a long prompt; cancelled it ends the answer. ignore_eos: stop tokens do not stop it (benchmarks).
        begun: the first tokens of an answer that was cut off; it goes on after them.
        Raises EmptyPromptError and ContextTooSmallError at once, before anything is computed.
        """
        text = self._new_text([*prompt_tokens, *begun], sampling, begun)
        return Generation(**text, n_predict=n_predict, ignore_eos=ignore_eos, begun=begun, loop=self._new_loop(run))

    def generate_parallel(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n_predict: int = -1,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        run: Run | None = None,
        ignore_eos: bool = False,
    ) -> ParallelGeneration:
        """Answers several prompts, EngineConfig.n_parallel of them at a time; the others wait for one to end.

        Each greedy answer is that of `generate` for its prompt alone, others with a fixed draft length; so are other
        parameters and errors. sampling: of all texts, or of each. `draft` and `gamma` are those of the session now.
        """

        def new_answer(prompt: Sequence[int], n_predict: int, sampling: SamplingConfig) -> Answer:
            return Answer(**self._new_text(prompt, sampling), n_predict=n_predict, ignore_eos=ignore_eos)

        generation = ParallelGeneration(self._new_loop(run), new_answer)
        configs = [sampling] * len(prompts) if isinstance(sampling, SamplingConfig) else sampling
        for prompt, config in zip(prompts, configs, strict=True):
            generation.add(prompt, n_predict=n_predict, sampling=config)
        return generation

    def _new_loop(self, run: Run | None) -> SpeculativeLoop:
        """The loop of new answers; those in progress lose the KV caches."""
        placement = self.placement
        if self._loop is not None:
            self._loop.is_replaced = True
        self._loop = SpeculativeLoop(
            self.target,
            # a GPU failed: placement has only its figures and slots in RAM left
            placement=None if placement is None or placement.first.state == "fallen back" else placement,
            observe=self._call_observers,
            run=run or Run(),
            recover=self._recover,
            governor=self.governor if self.gamma > 0 else None,
            watch=self.watch_memory,
            draft_p_min=self.config.draft_p_min,
            draft_of=self._draft_of,
        )
        return self._loop

    def _new_text(self, tokens: Sequence[int], sampling: SamplingConfig, begun: Sequence[int] = ()) -> dict[str, Any]:
        """The fields of an Answer to a prompt that ends with `begun`, but n_predict, ignore_eos. Raises InputError."""
        prompt = [int(token) for token in tokens]
        if not prompt:
            raise EmptyPromptError("The prompt is empty.", "Type something, or give -p TEXT.")
        limit = self.target.n_ctx - RESERVED_TOKENS
        if len(prompt) > limit:
            raise ContextTooSmallError(
                f"The prompt has {len(prompt):,} tokens, but the context of {self.target.n_ctx:,} holds at most "
                f"{max(limit, 0):,} of them.",
                f"Use -c {len(prompt) + 256} or more, or a shorter prompt.",
            )
        tags = self.model.reasoning_tags(self.template)
        end = prompt[: len(prompt) - len(begun)][-_TAG_TOKENS:]
        text = b"".join(self.model.piece(token, special=True) for token in end).decode("utf-8", "replace")
        is_open = tags is not None and begins_in_reasoning(text, tags)
        sampler = new_sampler(sampling, self.model, begun, tags.end if tags is not None and is_open else "")
        if self.script is not None:
            sampler = ScriptedSampler(sampling, self.model.info.n_vocab, self.script)
        has_model = self.governor is not None and self.gamma > 0 and not isinstance(self.draft, NgramDraft)
        ngrams = NgramDraft() if has_model and self.script is None else None
        return {
            "state": TextState(self.target.sequences[0], self._draft_of(0), sampler, prompt, ngrams),
            "gamma": _at_most(self.gamma, self.target.n_drafts_max),
            "n_ctx": self.target.n_ctx,
            "n_keep": min(self.n_keep, len(prompt)),
            "context_shift": self.config.context_shift,
            "reasoning_tags": tags,
            "begins_in_reasoning": is_open,
        }

    def _draft_of(self, sequence: int) -> DraftSource:
        if self.gamma == 0:
            return DraftSource()
        if self.script is not None and isinstance(self.draft, NgramDraft):
            return ScriptedDraft(self.script)
        return self.draft if sequence == 0 else self.draft.for_sequence(sequence)

    @property
    def _recover(self) -> Recover | None:
        """The function that an answer calls when a GPU fails; None where it cannot go on without."""
        draft_uses_gpu = isinstance(self.draft, ContextDraft) and self.draft.context.model.uses_gpu
        return self._fall_back if self.config.cpu_fallback and (self.model.uses_gpu or draft_uses_gpu) else None

    def _call_observers(self, record: StepRecord) -> None:
        budget = self.target.budget
        if budget is not None and budget.budget is not None and self.target.mode != "stock":
            note = unmet_budget(record)
            if note and note not in self.info.notes:
                self.run.report(note)
        for observer in self.observers:
            observer(record, self)

    def _fall_back(self, error: DeviceFailedError) -> None:
        """Gives the answer in progress contexts on the CPU. Raises MoeedgeError if the models cannot be loaded."""
        text = f"{error.message} The models are loaded again, and the answer goes on, on the CPU."
        self.run.report(text)
        make_room = None
        if self.placement is not None:
            self.placement.fall_back(context_usable=not self.target.is_closed)
            make_room = self.placement.make_room
        self.target, self._chosen, self.draft = loading.reopen_on_cpu(
            self.config, self.target, self._chosen, self.draft, self._resources, make_room
        )
        if self.placement is not None:
            self.placement.follow(self.target)
        self.info = replace(self.info, n_whole_layers=0, **_cache_fields(None))
        assert self._loop is not None
        self._loop.replace_target(self.target)

    def watch_memory(self) -> None:
        """Notifies of what has happened to experts in RAM since the last answer, which no thread does meanwhile."""
        if self.placement is not None:
            self.placement.watch_memory()

    def measure_postponed(self, run: Run) -> None:
        """Measures what `PlacementConfig.calibrate_later` left for after the first answer, once, between answers.

        run: cancelled, a later call measures. Afterwards the KV caches are empty, and `placement` is None where a
        cache that no option named does not pay.
        """
        placement = self.placement
        if placement is None or not placement.first.usable or placement.postponed is None:
            return
        run = Run(self.run.show, cancelled=run.cancelled)
        try:
            self.calibration, stays = placement.postponed(run)
        except Cancelled:
            return
        except DeviceFailedError as error:
            if self._recover is None:
                raise
            self._recover(error)
            return
        except BackendError:
            placement.report_trouble()
            if not placement.first.lost:
                raise
            stays = True  # lost since the last step: nothing is measured, the CPU computes all experts
        placement.postponed = None
        over = {POSTPONED, *(note.partition(":")[0] for note in run.notes)}  # or decided anew
        over |= set() if stays else {"device path", "prefill path"}
        kept = [note for note in self.info.notes if note.partition(":")[0] not in over]
        self.info.notes[:] = [*kept, *run.notes]
        if not stays:
            self.run.say(run.notes[-1], Level.WARNING)
            placement.close()  # its memory is given back
            self.placement = None
            self.info = replace(self.info, **_cache_fields(None))

    def placement_stats(self) -> PlacementStats | None:
        """Figures of expert placement since the session began; None without a device."""
        return self.placement.stats() if self.placement is not None else None

    def memory_uses(self) -> list[MemoryUse]:
        """The memory of the models and their contexts by kind; a head's weights are its own file's or the target's."""
        uses = self.target.memory_uses()
        if isinstance(self.draft, ContextDraft):
            is_own = self.draft.context.model is not self.model
            uses += [use if is_own else replace(use, weights_bytes=0) for use in self.draft.context.memory_uses()]
        return uses

    def reset(self) -> None:
        """Empties both KV caches; experts stay on the device."""
        if self.placement is not None:
            self.placement.begin_text()
        self.target.clear()
        self.draft.clear()

    def close(self) -> None:
        """Frees contexts and models; closing twice is harmless."""
        self._resources.close()
        # it holds this session: what the policy learned would stay in memory until the garbage collector runs
        self._loop = None


def prepare_answers(
    session: Session, sampling: SamplingConfig, template: TemplateChoice, *, raw: bool = False
) -> list[str]:
    """Sets the chat template of the next prompts; with a grammar a model that can leave out thinking does so.

    Returns notes. Raises InputError for what the template or, with a grammar, the model's vocabulary cannot do.
    """
    notes = [] if raw else session.model.check_template(template)
    if sampling.grammar:
        Grammar.parse(sampling.grammar, session.model.vocab)
        unthinking = replace(template, think="off")
        variables = frozenset() if raw else session.model.chat_format(template.source).variables
        if template.think == "auto" and unthinking.can_think_so(variables):
            template = unthinking
            notes.append("The grammar holds from the first token on, so the model does not think before it answers.")
    session.template = template
    return notes


def _at_most(n: int, limit: int | None) -> int:
    return n if limit is None else min(n, limit)


def _open_placement(
    config: EngineConfig,
    device: ResolvedDevice,
    target: Context,
    draft: DraftSource,
    gammas: tuple[int, int],
    run: Run,
) -> tuple[PlacementManager | None, Calibration | None]:
    """Opens the placement of experts, and what was measured for it; None where there is nothing to place.

    gammas: the usual draft length, and the longest.
    """
    no_cache = config.layers_measured and config.placement.cache_ratio == 0
    if config.mode != "moeedge" or target.sensor is None or no_cache or adapts_experts(config.context.adapters):
        return None, None
    in_ram = None
    if device.loads_misses:
        in_ram = _in_ram(config, run) if device.ram_alone else _next_to_device(config)
    opening = Opening(
        config=config.placement,
        device=device,
        in_ram=in_ram,
        target=target,
        draft=draft.context if isinstance(draft, ModelDraft) else None,
        gamma=gammas[0],
        gamma_max=gammas[1],
        keep=config.placement.has_size or config.layers_measured,
        run=run,
        has_draft_states=isinstance(draft, HeadDraft) and draft.kind.block is None,
    )
    return opening.open()


def _in_ram(config: EngineConfig, run: Run) -> PlacementConfig:
    """The placement of experts in RAM alone, where --vram has no meaning."""
    if config.placement.vram_bytes is not None:
        run.warn("There is no GPU for experts: --vram has no effect. --ram SIZE sets the memory for them.")
    placement = _next_to_device(config)
    return placement if placement.has_size else replace(placement, cache_ratio=config.placement.cache_ratio)


def _next_to_device(config: EngineConfig) -> PlacementConfig:
    """The placement in RAM of experts that are not on a device, whose size --vram and --cache-ratio give."""
    return replace(config.placement, vram_bytes=config.ram if isinstance(config.ram, int) else None, cache_ratio=None)


def _cache_fields(placement: PlacementManager | None) -> dict[str, Any]:
    if placement is None:
        empty: dict[str, Any] = {"is_device": True, "place": "", "cache_ratio": 0.0, "cache_slots": 0}
        empty |= {"pool_bytes": 0, "vram_bytes": None}
        return {"device": "none", "policy": "none", **empty}
    tier, info = placement.first, placement.cache.info
    memory = tier.memory()
    return {
        **{"device": tier.label, "policy": placement.driver.policy.name, "cache_ratio": tier.cache_ratio},
        **{"is_device": tier.is_device, "place": tier.place},
        **{"cache_slots": info.n_slots, "pool_bytes": info.pool_bytes, "vram_bytes": memory and memory[0]},
    }
