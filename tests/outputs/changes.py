"""What went, came or was renamed since the recordings, each with its reason: `compare` ignores exactly these.

A rule is (pattern, successor, reason). The pattern is a regular expression of a place in the recordings from its
beginning: "options: bench --fit.*" is every case of that option, "commands: .*\\.uploads" a key in any command.
Successor: the key's new name (the last part of the place), or "" where nothing follows. Rules that match nothing are
reported, but for those with a successor in another part of the table.
"""

from __future__ import annotations

# module -> where it is now; the first row whose old name begins a module's name applies
MODULES: dict[str, str] = {
    **{f"moeedge.ui.{name}_views": f"moeedge.lab.cli.{name}" for name in ("budget", "fit", "trace", "validate")},
    "moeedge.llama.draft_model": "moeedge.lab.experiments.ablation",
    "moeedge.llama.context_budget": "moeedge.llama.context",
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
            *("ablate", "budget_analysis", "fit", "replay", "replay_options", "schema", "simulate", "simulate_options"),
            *("trace", "trace_options", "validate", "widen"),
        )
    },
    **{f"moeedge.trace.{name}": f"moeedge.lab.traces.{name}" for name in ("exporters", "importers", "schedule")},
    "moeedge.analysis.groups": "moeedge.analysis.model_profile",
    "moeedge.analysis.utility_curves": "moeedge.analysis.predictors",
    "moeedge.cli.profile_texts": "moeedge.cli.profile_options",
    "moeedge.cli.view_options": "moeedge.cli.chat_options",
    "moeedge.trace.summary": "moeedge.lab.cli.trace",
    "moeedge.cli.replay_run": "moeedge.lab.cli.replay_run",
    "moeedge.cli.simulate_run": "moeedge.lab.cli.simulate_run",
    "moeedge.cli.trace_budgets": "moeedge.lab.cli.trace_options",
    "moeedge.ui.sim_views": "moeedge.lab.views.sim_views",
    "moeedge.ui.formula_views": "moeedge.lab.cli.validate",
    "moeedge.sim": "moeedge.lab.sim",
    "moeedge.llama.context_size": "moeedge.llama.model_memory",
    "moeedge.planning.model_card": "moeedge.planning.headers",
    "moeedge.scheduler.planning_thread": "moeedge.scheduler.manager",
    "moeedge.hub.download": "moeedge.hub.pull",
    "moeedge.cli.bench_tests": "moeedge.cli.bench_options",
    "moeedge.bench.passes": "moeedge.bench.arms",
    "moeedge.bench.harness": "moeedge.bench.experiment",
    "moeedge.analysis.profile_json": "moeedge.analysis.model_profile",
    "moeedge.data.texts": "moeedge.data.datasets",
    "moeedge.bench.synthetic": "moeedge.bench.experiment",
    "moeedge.bench.budgets": "moeedge.bench.figures",
    "moeedge.bench.budget_search": "moeedge.bench.budget_choice",
    "moeedge.widen": "moeedge.lab.widen",
    "moeedge.schemas": "moeedge.lab.cli.schema",
    **{f"moeedge.cli.{name}": "moeedge.cli.models" for name in ("list_models", "show", "pull", "rm")},
    **{f"moeedge.cli.{name}": "moeedge.cli.machine" for name in ("devices", "doctor", "ps", "worker")},
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
    (r"commands(-slow)?: (schema )?bench.*[./](acceptance|confidences|routing(_\w+)?)\b", "", "--accept and --routing"),
    (r"commands(-slow)?: (schema )?bench.*[./](products_per_s|prompt_limit_ts)\b", "", "limits of prompts"),
    (r"options: (.*\.(routing|scripted)$|bench --(accept(-confidence)?|routing)\b)", "", "the same"),
    (r"screens: (bench_views\.model_table|parallel_views\.parallel_markdown) ", "", "parts of bench_views.render"),
    (r"choices: speculation check_gamma: ", "", "draft lengths are checked in one place, which is no formula"),
    (r"functions: planning\.estimate\.known_model: ", "", "sizes of a model are one type, with what a context takes"),
    (r"commands: list fits: \d+\.fit\.device_ratio", "", "no cache where an expert per layer has no room, as in chat"),
    (r"commands-slow: report\.json: ", "lab pair", "the list of its keys lost model_profile.pair"),
    (r"commands-slow: validate .*constants_sha256", "", "the file lost the programs of predictions"),
    (r"commands-slow: validate measured: .*error", "", "measured"),
    (r"commands: schema trace: /meta/parameters/", "", "the parameters of a run are described since"),
    (rf"commands(-slow)?: (schema )?bench.*[./]{_CACHE_MODE}$", "lab replay", "the mode ran no model"),
    (rf"commands(-slow)?: (schema )?bench.*[./]{_FIT}(\.|$)", "lab fit prints its predictions", "bench --fit went"),
    (rf"functions: bench\.parallel_figures\.parallel_record.*{_FIT}$", "", "the same"),
    (r"(commands|functions).*[./]budget_prefer_resident$", "", "costs more quality than it gains hits"),
    (r"functions: cli\.foreign\.foreign_options: ", "", "rows for options that moved to the lab"),
    (r"options: \S+ foreign --system ", "chat --system TEXT", "an option of chat since 0.15.0"),
    (r"options: chat --system ", "", "the same"),
    (r"tokens: talk: 2\.(24|35)$", "", "the recorded chat could not change its model or context, as no chat of a user"),
    (r"tokens: talk: 2\.6$", "", "/set seed names the word random, too"),
    (r"(tokens: talk: 2\.(2|45|46|5)$|(views|functions): (ui\.)?chat\.(settings\.(listing|names)|commands\.comp))", "",
     "settings stand in the order of the options that declare them"),
    (r"functions: sim\.constants\.frozen: .*constants_sha256", "", "the file lost the programs of predictions"),
    (r"commands: profile budgets: ", "lab budget", "research"),
    (r"(commands: profile cut: |commands-slow: profile.*: .*)model_profile\.pair", "lab pair", "research"),
    (r"screens: profile_views\.print_model ", "", "the draft is compared by lab pair"),
    (r"(screens: validate_views\.print_|(commands-slow|options): validate )(predictions|moe[_-]spec)",
     "lab simulate", "a simulate command or a test says the same"),
    (r"views: plan_view\.plan_json: ", "", "the order of its keys, as text"),
    (r"screens: fit_views\.print_fit ", "", "lab fit lost predictions for other machines"),
    (r"screens: bench_views\.(print_ablation|ablation_change) ", "", "lab ablate has fewer figures"),
    (r"commands-slow: (fit|ablate|profile (measured budgets|ranking)|rank\.json|bench budgets): ", "lab", "the same"),
    (r"options: \w+ --budget-(file|layers|prefer-resident)\b", "", "they gained nothing, or cost quality"),
    (r"options: (?!.*budget-prefer).*\.(prefer_resident|order|ranking|per_layer)\b", "", "the same, in configurations"),
    (r"options: (chat|calibrate|bench|replay|simulate) --budget-ranking\b", "lab", "static and oracle are of the lab"),
    (r"options: bench .*: config\.work$", "", "one function measures texts one by one and together"),
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
    (r"(options: plan -m qwen3-30b-a3b|commands: plan absent|screens: plan_view\.print_estimate .*): ",
     "list --all --fits", "a plan needs the model's header"),
    (r"options: plan (--draft(-n|-max)?|--spec-draft-n-max|--gamma|-t|--threads|--(spec-)?draft-p-min"
     r"|LLAMA_ARG_THREADS|LLAMA_ARG_(SPEC_)?DRAFT_(N_MAX|MAX|P_MIN))[ =:]", "", "plan takes what chat takes"),
    (r"options: doctor: config\.honoured\.LLAMA_ARG_(THREADS|SPEC_DRAFT_P_MIN)\.", "", "the same"),
    (r"functions: planning\.estimate\.known_models?: .*\.(is_exact|name)( \d+)?\b", "", "only the same plan had them"),
    (r"options: habit ", "", "the reference lists every word of other programs"),
    (r"options: (.* )?--repack\b", "", "slots in the layout of llama.cpp's faster kernels were never faster"),
    (r"options: .*\.repack\b", "", "the same, in configurations"),
    (r"(options|functions): .*\.reads_ahead\b", "", "experts read ahead by prediction were never faster"),
    (r"options: bench .*: config\.plans$", "", "numbers of values, which count the same field"),
    (r"options: .* declared: 5$", "", "texts of help"),
    (r"options: bench.*: config\.(Budget)?Sweep\.", "", "one object compares caches, speculation and texts together"),
    (r"options: bench( --trace-out|: config\.trace_out)", "profile --trace-out", "profile records the same routing"),
    (r"screens: sim_views\.print_replay (0 100: 57|0 80: 101|1 100: 26|1 80: 29)$", "", "names profile --trace-out"),
    (r"screens: sim_views\.shortcomings [01] 80: 1$", "", "the same"),
    (r"(commands|options): trace convert", "lab trace import", "no command reads the layouts of other tools"),
    (r"options: trace import.*: (config|ended)\.", "", "the trace is saved without a layout"),
    (r"options: fit --(no-)?(plot|measure-speed-up)\b", "bench", "bench measures speed-ups, -o json has all figures"),
    (r"options: ablate --cutoff .*: ended\.names", "", "lists of numbers are refused in one way"),
    (r"screens: budget_views\.", "", "lab budget lost clusters, pictures of pairs and Eq. 5 to the letter"),
    (r"options: replay( --(link|step-time)\b|.*: config\.ReplayConfig\.link$)", "replay --max-uploads", "the same"),
    (r"options: replay: config\.work$", "", "the name of the function that replays"),
    (r"options: validate measured( (--backend|--spec-draft-model|-dev) .*)?: (config\.|ended\.|parsed$)", "",
     "models are loaded with the first measurement"),
    (r"options: simulate --(ram-ratio|disk-rate)\b", "chat --ram, plan --ram", "the engine measures it"),
    (r"options: simulate --(event-log|gantt)\b", "simulate -o json", "rows have the parts of a token's time"),
    (r"screens: sim_views\.print_(replay|curves)", "", "belady's bound of pairs, and the offline bound"),
    (r"screens: sim_views\.print_simulation 2", "", "the tier in RAM"),
    (r"screens: formula_views\.formulas_markdown ", "validate formulas -o md", "the command prints it itself"),
    (r"screens: validate_views\.print_figures", "", "no hash of constants"),
    (r"commands-slow: validate table2: .*constants_(frozen|sha256)$", "", "the same"),
    (r"commands(-slow)?: replay.*\.(demand_bound_hit_rate_pairs|link_bytes_per_s|step_time_s)$", "", ""),
    (r"commands-slow: replay curve: .*offline_bound", "", "the offline bound"),
    (r"commands: (replay link|simulate ram): ", "", "options that went"),
    (r"functions: scheduler\.config\.PlacementConfig: .*policy_config\.future$", "lab replay", "no policies"),
    (r"functions: sim\.(model_shape|step_costs)\..*(memory_bytes|\.handoff\.)", "", "not read; calls of 0"),
    (r"(commands(-slow)?: (profile|chat|plan|schema)|functions: analysis\.profile_json).*[./ ]provenance([./]|$)", "",
     "every record says where it is from"),
    (r"commands: doctor: \d+$", "", "the same, in its list of keys"),
    (r"commands(-slow)?: .*[./](model_header_sha256|trace_sha256)$", "", "the same"),
    (r"commands(-slow)?: (replay|simulate|ablate|validate)[^:]*: \d+\.(version|commit|dirty|llama_cpp_version|cpu|os"
     r"|python|time)$", "", "the same"),
    (r"options: replay.*: config\.(_Job\.source|inputs\.\d+\.provenance)\.", "", "the same"),
    (r"options: .*: config\.Run\.", "", "one object in place of callbacks"),
    (r"commands(-slow)?: chat.*: stats\.(draft_choice|vram_bytes|placement|kept_probability|hit_rate_pairs"
     r"|acceptance_rate|experts_(natural|max|per_verification)|expert_budget|budget(_ranking|_policy)?|placement(\.\w+)*\.(lookahead"
     r"|gain|vram_\w+|hit_rate_\w+|\w+_per_\w+|wait_share))$", "", "a chat's JSON leaves out keys whose value is null"),
    (r"options: (ablate|fit|validate measured|bench) (-n?cmoe|--(n-)?cpu-moe|-hft|--hf-token|--(spec-)?draft-p-min|-ngl"
     r"|--(n-)?gpu-layers|--no-warm-start|--offline|HF_TOKEN|LLAMA_ARG_(OFFLINE|(N_)?CPU_MOE|N_GPU_LAYERS"
     r"|SPEC_DRAFT_P_MIN))\b", "", "the lab's commands take the options of engine and cache that others take"),
    (r"options: validate measured (-md|--draft-max|--model-draft|LLAMA_ARG)", "", "the same"),
    (r"options: (ablate|bench|replay|profile|worker) (--limit|--expert-bytes|-[nrst]) (-\d|0|70000): ", "",
     "numbers out of range are refused in one way"),
    (r"options: bench.*: parsed(\.-pg)?$", "", "an empty list is no given value"),
    (r"options: [\w ]+ (-fa|--flash-attn)( -3)?: ", "", "without a value it is on, as in earlier llama.cpp"),
    (r"functions: trace\.steps\.drafts_of: .*\.(acceptance_(chance|rate)|accepted|drafted|judged)$", "",
     "rates are derived from counts"),
    (r"screens: chat\.settings\.seed_or_random ", "", "a function of engine.types since"),
    (r"options: (chat|bench) foreign (--simple-io|--color|-co|--keep|-np|--parallel|-sm|--split-mode"
     r"|--(spec-)?draft-(n-)?min) 7?: ", "", "values of the table are others, the program's are the same"),
    (r"options: bench (-fa|--flash-attn|-ct[kv]|--cache-type-[kv]|LLAMA_ARG_(FLASH_ATTN|CACHE_TYPE_[KV]))[ =]", "",
     "lists, as llama-bench has them"),
    (r"options: bench (--draft-max|--parallel|LLAMA_ARG_(SPEC_)?DRAFT_(N_)?MAX)[ =].*: ended\.names", "", "ranges"),
    (r"options: bench .*: config\.(BenchPlan\.base|EngineConfig)\.n_(threads|u?batch)$", "", "the first of a list"),
    (r"options: bench --perplexity (-3|no such): ended\.names", "", "names of an error's lists"),
    (r"options: schema (--output|-o)\b", "", "an option since 0.16.0"),
    (r"options: fit --draft-max -3: ended\.names", "", "its texts are those of every list of numbers"),
    (r"commands: schema( (replay|simulate|plan|profile|doctor|rivals))?: (printed|/)", "",
     "more records have a schema since"),
    (r"tokens(-slow)?: (emulated|plain on) sp-moe(-prefetch)?( |:|$)", "sp-moe-prefetch",
     "the engine computes misses on the CPU"),
    (r"functions: analysis\.published\.reproduced: ", "", "Appendix B.2 of MoESD, bounds of distinct experts"),
    (r"options: replay (--hardware|--model|-mu?|LLAMA_ARG_MODEL)\b", "", "states the times of Eq. 9 and 10"),
    (r"options: replay.*: config\.\w+\.(policies\.|(cost_model|hardware)$)", "", "sp-moe-prefetch is a policy"),
    (r"commands: replay( uploads)?: \d+\.", "", "Appendix D, the program's constants; sp-moe-prefetch is a row more"),
    (r"commands: simulate: \d+\.", "", "sp-moe-prefetch is a row more"),
    (r"commands: validate formulas: ", "", "rows of MoESD's Table 2 come before the study's"),
    (r"options: ablate.*: config\.EngineConfig\.placement\.policy$", "sp-moe-prefetch", "the same"),
    (r"options: chat --expert-budget auto: config\.measure_anew$", "calibrate --expert-budget", "chat never asks"),
    (r"options: bench.*: config\.(BenchPlan|plans\.\d+)\.modes\.\d+\.(p_min|source)$", "",
     "modes may have drafts of their own"),
]  # fmt: skip
