"""A session: target, draft and their contexts, loaded once; it answers one prompt after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from moeedge.engine.drafts import DraftSource, ModelDraft, NgramDraft, NoDraft
from moeedge.engine.generation import Generation
from moeedge.engine.loading import choose_draft, kv_on_gpu, load_target, resolve_device
from moeedge.engine.sampling import Sampler
from moeedge.engine.speculative import SpeculativeLoop
from moeedge.engine.types import EngineConfig, EngineInfo, SamplingConfig
from moeedge.errors import ContextTooSmallError, EmptyPromptError
from moeedge.hardware import devices
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama.context import Context
from moeedge.llama.context_size import choose_n_ctx
from moeedge.llama.model import Mode, Model
from moeedge.native.sensor import Counts
from moeedge.notifications import Notification, Notify, ignore
from moeedge.scheduler.manager import ExpertPlacement
from moeedge.scheduler.opening import Opened, check_policy, open_placement
from moeedge.scheduler.stats import PlacementStats, StepRecord

Observer = Callable[[StepRecord, "Session"], None]

# a prompt must leave room for an answer; llama.cpp's programs ask for the same
_RESERVED_TOKENS = 4


class Session:
    """Make one with `Session.open`; it is a context manager.

    target, draft_context: the llama.cpp contexts; draft_context is None without a draft model.
    draft: where drafts come from. gamma: the draft length, may be changed between answers (0: plain decoding).
    n_keep: tokens at the start that a context shift never drops, e.g. the system message.
    observers: called with (StepRecord, Session) in each step's observe phase, prefill included (n_verified 0).
    counts: activations of the last verification or prefill, uint32 [n_layers, n_experts]; None for a dense model.
    placement: schedules and prefetches experts; None without a device.
    calibration: what was measured for it; None where nothing was.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Context,
        draft: DraftSource,
        draft_context: Context | None,
        info: EngineInfo,
        opened: Opened,
        resources: ExitStack,
        *,
        notify: Notify,
    ) -> None:
        self.config = config
        self.target = target
        self.draft = draft
        self.draft_context = draft_context
        self.info = info
        self.gamma = info.gamma
        self.n_keep = 1 if target.model.adds_bos else 0
        self.observers: list[Observer] = []
        self.notify = notify
        self.placement: ExpertPlacement | None = opened.placement
        if self.placement is not None:
            self.placement.notify = self._report
        self.calibration = opened.calibration
        self._loop: SpeculativeLoop | None = None
        self._resources = resources

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        *,
        model: Model | None = None,
        draft_model: Model | None = None,
        notify: Notify = ignore,
    ) -> Session:
        """Loads the model, checks and loads the draft, makes the contexts; raises MoeedgeError with a mend.

        A model that is given is shared with other sessions: it is not loaded again and stays open afterwards.
        notify: called before anything that takes a while, and when something goes off in the middle of an answer (a
        lost device); the attribute of the same name may be replaced later.
        """
        check_policy(config.placement)
        device = resolve_device(config)
        if "no-sd" in config.placement.ablations and config.mode == "moeedge":
            config = replace(config, gamma=0)
        with ExitStack() as stack:
            if model is None:
                model = stack.enter_context(load_target(config, device))
            notes: list[str] = []
            if model.info.n_experts == 0:
                notes.append(f"{config.model.name} is dense, no experts: placement off.")
            draft_model, n_common, use_ngram = choose_draft(config, device, model, draft_model, notes, stack)
            models = [model] if draft_model is None else [model, draft_model]
            n_ctx = _context_size(config, device, models, notes)
            target = stack.enter_context(_make_context(config, model, n_ctx))
            draft: DraftSource = NgramDraft() if use_ngram else NoDraft()
            draft_context = None
            if draft_model is not None:
                draft_context = stack.enter_context(_make_context(config, draft_model, target.n_ctx))
                draft = ModelDraft(draft_context, n_vocab=n_common, is_eog=draft_model.is_eog)
            info = _describe(config, target, draft, draft_model, notes)
            opened = open_placement(config, device, target, draft_context, gamma=info.gamma, notify=notify)
            if opened.placement is not None:
                stack.callback(opened.placement.close)
                if isinstance(draft, ModelDraft):
                    draft.keeps_hidden_states = opened.placement.reads_hidden_states_now
                    if opened.placement.drafting is not None:
                        draft.on_token = opened.placement.drafted
            notes.extend(opened.notes)
            info = _placed(info, opened)
            return cls(config, target, draft, draft_context, info, opened, stack.pop_all(), notify=notify)

    @property
    def model(self) -> Model:
        """The target model."""
        return self.target.model

    @property
    def counts(self) -> Counts | None:
        return self._loop.counts if self._loop is not None else None

    def set_mode(self, mode: Mode) -> None:
        """Switches between our backend and stock's path, for comparisons within one process."""
        if self.placement is not None:
            if mode == "stock":
                self.placement.detach()
            else:
                self.placement.attach()
        self.target.set_mode(mode)
        if self.draft_context is not None:
            self.draft_context.set_mode(mode)

    def generate(
        self,
        prompt_tokens: Sequence[int],
        *,
        n_predict: int = -1,
        sampling: SamplingConfig,
        cancel: Callable[[], bool] | None = None,
        ignore_eos: bool = False,
    ) -> Generation:
        """Answers `prompt_tokens`; what the KV caches hold of them from the last call is not computed again.

        n_predict: the most tokens, -1 until the model stops. cancel: asked between steps and between the pieces of a
        long prompt; True ends the answer.
        ignore_eos: stop tokens are kept and do not stop (benchmarks).
        Raises EmptyPromptError and ContextTooSmallError at once, before anything is computed.
        """
        prompt = [int(token) for token in prompt_tokens]
        if not prompt:
            raise EmptyPromptError("The prompt is empty.", "Type something, or give -p TEXT.")
        limit = self.target.n_ctx - _RESERVED_TOKENS
        if len(prompt) > limit:
            raise ContextTooSmallError(
                f"The prompt has {len(prompt):,} tokens, but the context of {self.target.n_ctx:,} holds at most "
                f"{max(limit, 0):,} of them.",
                f"Use -c {len(prompt) + 256} or more, or a shorter prompt.",
            )
        loop = SpeculativeLoop(
            self.target,
            self.draft if self.gamma > 0 else NoDraft(),
            Sampler(sampling, self.model.info.n_vocab),
            prompt,
            placement=self.placement,
            observe=self._call_observers,
            cancel=cancel,
        )
        self._loop = loop
        return Generation(
            loop,
            n_predict=n_predict,
            gamma=self.gamma,
            n_ctx=self.target.n_ctx,
            n_keep=min(self.n_keep, len(prompt)),
            context_shift=self.config.context_shift,
            ignore_eos=ignore_eos,
            cancel=cancel,
        )

    def _call_observers(self, record: StepRecord) -> None:
        for observer in self.observers:
            observer(record, self)

    def _report(self, notification: Notification) -> None:
        self.info.notes.append(notification.text)
        self.notify(notification)

    def placement_stats(self) -> PlacementStats | None:
        """Counters of expert placement since the session began; None without a device."""
        return self.placement.stats() if self.placement is not None else None

    def reset(self) -> None:
        """Empties both KV caches; experts stay where they are."""
        if self.placement is not None:
            self.placement.reset()
        self.target.clear()
        if self.draft_context is not None:
            self.draft_context.clear()

    def close(self) -> None:
        """Frees contexts and models; closing twice is harmless."""
        self._resources.close()
        # both hold this session: what the policy learned would stay in memory until the garbage collector runs
        self._loop = None
        if self.placement is not None:
            self.placement.notify = ignore

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _context_size(config: EngineConfig, device: ResolvedDevice, models: Sequence[Model], notes: list[str]) -> int:
    """Tokens; raises InputError where that many do not fit the memory that the KV caches will lie in."""
    free_bytes = None  # of this machine
    if kv_on_gpu(config, device, models[0]):
        reading = devices.read_memory(device)
        if reading is None:  # llama.cpp's GPU is not the one for experts: let llama.cpp say what does not fit
            return config.n_ctx or models[0].info.n_ctx_train
        free_bytes = reading.free_bytes
    n_ctx, note = choose_n_ctx(models, config.n_ctx, free_bytes)
    notes.extend([note] if note else [])
    return n_ctx


def _make_context(config: EngineConfig, model: Model, n_ctx: int) -> Context:
    return Context(
        model,
        n_ctx=n_ctx,
        n_threads=config.n_threads,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        mode=config.mode,
    )


def _describe(
    config: EngineConfig, target: Context, draft: DraftSource, draft_model: Model | None, notes: list[str]
) -> EngineInfo:
    info = target.model.info
    speculates = not isinstance(draft, NoDraft)
    name = "ngram" if isinstance(draft, NgramDraft) else "none"
    return EngineInfo(
        model=config.model.name,
        architecture=info.architecture,
        n_layers=info.n_layers,
        n_expert_layers=info.n_expert_layers,
        n_experts=info.n_experts,
        n_expert_used=info.n_expert_used,
        n_ctx=target.n_ctx,
        n_threads=target.n_threads,
        gamma=config.gamma if speculates else 0,
        draft=draft_model.path.name if draft_model is not None else name,
        device="none",
        policy="none",
        notes=notes,
    )


def _placed(info: EngineInfo, opened: Opened) -> EngineInfo:
    """`info` with where experts are."""
    placement = opened.placement
    if placement is None:
        return info
    return replace(
        info,
        device=placement.device,
        policy=placement.policy.name,
        cache_ratio=placement.cache_ratio,
        cache_slots=placement.cache.info.n_slots,
        pool_bytes=placement.cache.info.pool_bytes,
        vram_bytes=opened.vram_bytes,
    )
