// The kernels of a folder of PTX files.
#include <dirent.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <unordered_map>

#include "faults.h"
#include "parser.h"
#include "program.h"

namespace ptx {
namespace {

struct File {
  std::string text;
  std::vector<Variable> shared;
};
struct Place {
  std::string file;
  size_t at;  // after ".entry "
};
std::string folder;
std::unordered_map<std::string, File> files;
std::unordered_map<std::string, Place> places;
std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels;

void ReadFile(const std::string& name) {
  std::ifstream in(folder + "/" + name);
  std::stringstream buffer;
  buffer << in.rdbuf();
  File& file = files[name];
  file.text = buffer.str();
  const std::string& text = file.text;
  for (size_t at = text.find(".entry "); at != std::string::npos; at = text.find(".entry ", at)) {
    at += 7;
    places[text.substr(at, text.find('(', at) - at)] = {name, at};
  }
  for (const std::string start : {"\n.shared ", "\n.extern .shared "}) {
    for (size_t at = text.find(start); at != std::string::npos; at = text.find(start, at + 1)) {
      file.shared.push_back(Parser::ParseVariable(std::string_view(text).substr(at, text.find(';', at) - at)));
    }
  }
}

void ReadFolder() {
  if (!files.empty()) return;
  DIR* entries = opendir(folder.c_str());
  if (!entries) Refuse("unknown", "folder " + folder);
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (name.ends_with(".ptx")) ReadFile(name);
  }
  closedir(entries);
}

}  // namespace

void UseFolder(const std::string& new_folder) {
  folder = new_folder;
  files.clear();
  places.clear();
  kernels.clear();
}

const Kernel& FindKernel(const std::string& name) {
  ReadFolder();
  std::unique_ptr<Kernel>& kernel = kernels[name];
  if (kernel) return *kernel;
  const auto place = places.find(name);
  if (place == places.end()) Refuse("unknown", "kernel " + name);
  const File& file = files[place->second.file];
  kernel = std::make_unique<Kernel>(Parser(place->second.file, file.text, place->second.at, file.shared).Parse());
  return *kernel;
}

int ParseAll() {
  ReadFolder();
  for (const auto& [name, place] : places) FindKernel(name);
  return static_cast<int>(places.size());
}

std::string LineOf(const Kernel& kernel, int line) {
  const auto file = files.find(kernel.file);
  if (file == files.end()) return "";
  std::istringstream lines(file->second.text);
  std::string text;
  for (int i = 0; i < line && std::getline(lines, text);) ++i;
  return std::string(Trim(text));
}

void Refuse(const std::string& kind, const std::string& reason) {
  std::string message = kind + ": " + reason;
  if (position.kernel) {
    message += "\n  " + position.kernel->file + ":" + std::to_string(position.line) + ": " +
               LineOf(*position.kernel, position.line) + "\n  block " + std::to_string(position.block) + ", thread " +
               std::to_string(position.thread) + " of " + position.kernel->name;
  }
  throw Fault{message};
}

std::string Hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace ptx
