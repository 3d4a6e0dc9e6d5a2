#pragma once

namespace moeedge {

// From now on every buffer of the CPU of 4 MiB and more is in pages of 2 MiB where the system has them.
void use_large_pages();

} // namespace moeedge
