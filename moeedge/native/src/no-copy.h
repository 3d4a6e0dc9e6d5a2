// Base of classes whose objects own something that a copy would share.

#pragma once

namespace moeedge {

struct no_copy {
    no_copy()                            = default;
    no_copy(const no_copy &)             = delete;
    no_copy & operator=(const no_copy &) = delete;
};

} // namespace moeedge
