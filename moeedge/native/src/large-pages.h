#pragma once

namespace moeedge {

// From now on every buffer of the CPU that is allocated is in pages of 2 MiB where the system has them.
void use_large_pages();

} // namespace moeedge
