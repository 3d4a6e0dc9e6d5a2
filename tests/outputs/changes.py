"""What went or was renamed since the recordings, each with its reason: `compare` ignores exactly these.

A rule is (pattern, successor, reason). The pattern is a regular expression of a place in the recordings from its
beginning: "options: bench --fit.*" is every case of that option, "commands: .*\\.uploads" a key in any command.
Successor: the key's new name (the last part of the place), or "" where nothing follows. Rules that match nothing are
reported, but for those with a successor in another part of the table.
"""

from __future__ import annotations

# module -> where it is now; the first row whose old name begins a module's name applies
MODULES: dict[str, str] = {
    "moeedge.policies.spac.paper": "moeedge.lab.policies.spac_paper",
    **{
        f"moeedge.policies.{name}": f"moeedge.lab.policies.{name}"
        for name in ("adapmoe", "bounds", "fate", "hybrimoe", "layer_lru", "llama_cpp_cache", "moe_infinity", "sp_moe")
    },
    **{
        f"moeedge.analysis.{name}": f"moeedge.lab.analysis.{name}"
        for name in (
            *("budget_recording", "budget_report", "budget_trace", "comparison", "expert_budget", "expert_ranking"),
            *("published", "step_fit", "step_model", "what_if"),
        )
    },
    **{
        f"moeedge.bench.{name}": f"moeedge.lab.experiments.{name}"
        for name in ("ablation", "fit_report", "sequence_times", "speculation_fit", "step_times", "validation")
    },
    **{
        f"moeedge.cli.{name}": f"moeedge.lab.cli.{name}"
        for name in (
            *("ablate", "budget_analysis", "fit", "replay", "replay_options", "replay_run", "schema", "simulate"),
            *("simulate_options", "simulate_run", "trace", "trace_budgets", "trace_options", "validate", "widen"),
        )
    },
    **{f"moeedge.trace.{name}": f"moeedge.lab.traces.{name}" for name in ("exporters", "importers", "schedule")},
    "moeedge.analysis.groups": "moeedge.analysis.model_profile",
    "moeedge.analysis.utility_curves": "moeedge.analysis.predictors",
    "moeedge.cli.profile_texts": "moeedge.cli.profile_run",
    "moeedge.cli.view_options": "moeedge.cli.chat",
    "moeedge.ui.report": "moeedge.ui.pictures",
    "moeedge.trace.summary": "moeedge.lab.traces.summary",
    **{
        f"moeedge.ui.{name}": f"moeedge.lab.views.{name}"
        for name in (
            *("budget_plots", "budget_views", "fit_plots", "fit_views", "formula_views", "sim_views", "trace_views"),
            "validate_views",
        )
    },
    "moeedge.sim": "moeedge.lab.sim",
    "moeedge.widen": "moeedge.lab.widen",
}

# command -> its name now
COMMANDS: dict[str, str] = {
    name: f"lab {name}"
    for name in ("replay", "simulate", "trace", "fit", "ablate", "validate", "widen", "schema")
}  # fmt: skip

# (pattern of a place, last part of its new name, reason)
RENAMED: list[tuple[str, str, str]] = []

# (pattern of a place that went or came, successor in words, reason); 0.14.0's are in docs/changelog.md
_CACHE_MODE = r"(source|simulated_tg_ts|simulated_moeedge_tg_ts)"
_FIT = r"(predicted_speed_up|predicted_by_tokens|beyond_measured)"
REMOVED: list[tuple[str, str, str]] = [
    (r"commands-slow: report\.json: ", "lab pair", "the list of its keys lost model_profile.pair"),
    (r"commands-slow: validate .*constants_sha256", "", "the file lost the programs of predictions"),
    (r"commands-slow: validate measured: .*error", "", "measured"),
    (r"commands: schema trace: /meta/parameters/", "", "the parameters of a run are described since"),
    (rf"commands(-slow)?: (schema )?bench.*[./]{_CACHE_MODE}$", "lab replay", "the mode ran no model"),
    (rf"commands(-slow)?: (schema )?bench.*[./]{_FIT}(\.|$)", "lab fit prints its predictions", "bench --fit went"),
    (rf"functions: bench\.parallel_figures\.parallel_record.*{_FIT}$", "", "the same"),
    (r"(commands|functions).*[./]budget_prefer_resident$", "", "costs more quality than it gains hits"),
    (r"functions: cli\.foreign\.foreign_options: ", "", "rows for options that moved to the lab"),
    (r"functions: sim\.constants\.frozen: .*constants_sha256", "", "the file lost the programs of predictions"),
    (r"commands: profile budgets: ", "lab budget", "research"),
    (r"(commands: profile cut: |commands-slow: profile.*: .*)model_profile\.pair", "lab pair", "research"),
    (r"screens: profile_views\.print_model ", "", "the draft is compared by lab pair"),
    (r"(screens: validate_views\.print_|(commands-slow|options): validate )(predictions|moe[_-]spec)",
     "lab simulate", "a simulate command or a test says the same"),
    (r"screens: fit_views\.print_fit ", "", "lab fit lost predictions for other machines"),
    (r"screens: bench_views\.(print_ablation|ablation_change) ", "", "lab ablate has fewer figures"),
    (r"commands-slow: (fit|ablate|profile (measured budgets|ranking)|rank\.json|bench budgets): ", "lab", "the same"),
    (r"options: \w+ --budget-(file|layers|prefer-resident)\b", "", "they gained nothing, or cost quality"),
    (r"options: (?!.*budget-prefer).*\.(prefer_resident|order|ranking|per_layer)\b", "", "the same, in configurations"),
    (r"options: (chat|calibrate|bench|replay|simulate) --budget-ranking\b", "lab", "static and oracle are of the lab"),
    (r"options: bench --fit\b", "lab fit", "predictions stand in lab fit"),
    (r"options: bench .*(llama-cpp-cache|stock-fit)", "lab replay", "modes that ran no model, or could not run"),
    (r"options: fit --(what-if-used|what-if-hardware|acceptance(-chance)?)\b", "lab simulate", "other machines"),
    (r"options: fit.*: config\.FitPlan\.", "", "the same"),
    (r"options: plan (.* )?--trace\b", "", "plan uses what earlier runs of the model kept"),
    (r"options: plan.*: config\.RamTierRequest\.(n_drafts|drafted|plain|trace|hits)", "", "the same"),
    (r"options: profile .*--(budget-analysis|compare|save-ranking)\b", "lab budget, lab pair", "research"),
    (r"options: profile.*: config\.(with_|ProfileOutput\.)", "", "the same"),
    (r".*accuracy_carried", "", "decided: Algorithm 1 begins anew with every text (docs/log.md)"),
    (r"screens: profile_views\.print_profiles ", "", "the same, in the table"),
    (r"(views|functions): (ui\.)?figures\.(live_)?cache_(rows|figures): .*\.(draw|value)$", "", "bars are text"),
    (r"options: profile .*--pictures\b", "profile --report FILE.html", "the page has every picture"),
    (r"options: (chat|bench) foreign --(budget-\w|save-ranking|fit)", "", "rows that say where these went"),
    (r"options: bench --expert-budget.*: config\.plans$", "", "plans have budgets without the fields above"),
    (r"options: .* declared: 5$", "", "texts of help"),
]  # fmt: skip
