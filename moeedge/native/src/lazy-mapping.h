#pragma once

namespace moeedge {

// see moeedge_set_lazy_mapping
void set_lazy_mapping(bool on);

} // namespace moeedge
