// A text on the build of the libraries: build_info.cpp.
#pragma once

namespace fastvit {

extern const char kBuildInfo[];

}  // namespace fastvit
