// Preloaded into a program that never loads backends by itself (test-llama-archs does not): after this, the library that
// GGML_BACKEND_PATH names is registered, as in every llama.cpp program that parses the common options.
void ggml_backend_load_all(void);

__attribute__((constructor)) static void load_backends(void) {
    ggml_backend_load_all();
}
