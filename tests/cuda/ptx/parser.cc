#include "parser.h"

#include <dirent.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "faults.h"

namespace ptx {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!(text = Trim(text)).empty()) {
    const size_t end = std::min(text.find_first_of(" \t\r\n"), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return words;
}

int AsInteger(std::string_view text) { return std::atoi(std::string(text).c_str()); }

// Constants (4.5): 0f and 0d with the bits of a float, decimal and hexadecimal integers.
bool ParseNumber(const std::string& text, uint64_t* value) {
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D')) {
    *value = std::strtoull(text.c_str() + 2, nullptr, 16);
    return true;
  }
  const bool is_negative = text[0] == '-';
  const char* digits = text.c_str() + is_negative;
  if (*digits < '0' || *digits > '9') return false;
  *value = std::strtoull(digits, nullptr, 0);
  if (is_negative) *value = ~*value + 1;
  return true;
}

// Splits "name + offset"; nvcc writes no space.
std::pair<std::string, int64_t> SplitOffset(std::string_view text) {
  const size_t plus = text.find('+');
  if (plus == std::string_view::npos) return {std::string(Trim(text)), 0};
  return {std::string(Trim(text.substr(0, plus))), std::atoll(std::string(text.substr(plus + 1)).c_str())};
}

}  // namespace

std::string_view Trim(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string> SplitOperands(std::string_view text) {
  std::vector<std::string> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    depth += c == '{' || c == '[';
    depth -= c == '}' || c == ']';
    if (c != ',' || (depth != 0 && i < text.size())) continue;
    const std::string_view part = Trim(text.substr(begin, i - begin));
    if (!part.empty()) parts.emplace_back(part);
    begin = i + 1;
  }
  return parts;
}

int BitsOf(std::string_view type) {
  if (type == "pred") return 1;
  const std::string_view digits = type.empty() ? type : type.substr(1);
  if (digits == "8" || digits == "16" || digits == "32" || digits == "64") return AsInteger(digits);
  Refuse("unknown", "type " + std::string(type));
}

Variable Parser::ParseVariable(std::string_view text) {
  int align = 0, bits = 8;
  const auto words = Words(text);
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] == ".ptr") break;  // the rest is about what a pointer points to
    if (words[i] == ".align") {
      align = AsInteger(words[i + 1]);
    } else if (words[i][0] == '.' && words[i] != ".param" && words[i] != ".shared" && words[i] != ".extern") {
      bits = BitsOf(words[i].substr(1));
    }
  }
  const std::string_view last = words.back();
  const size_t bracket = last.find('[');
  const int elements = bracket == std::string_view::npos ? 1 : AsInteger(last.substr(bracket + 1));
  return {std::string(last.substr(0, bracket)), bits / 8 * elements, align ? align : bits / 8, 0};
}

Parser::Parser(const std::string& file, const std::string& text, size_t at, const std::vector<Variable>& shared)
    : text_(text), at_(at), file_shared_(shared) {
  line_ = 1 + static_cast<int>(std::count(text.begin(), text.begin() + static_cast<int64_t>(at), '\n'));
  kernel_.file = file;
  position.kernel = &kernel_;
}

Kernel Parser::Parse() {
  ParseHeader();
  ParseBody();
  for (const auto& [label, index] : branches_) {
    const auto at = labels_.find(label);
    if (at == labels_.end()) Refuse("unknown", "label " + label);
    kernel_.code[index].target = at->second;
  }
  for (const auto& [value, index] : constants_) kernel_.constants.emplace_back(index, value);
  return std::move(kernel_);
}

// name ( parameters ) directives
void Parser::ParseHeader() {
  const size_t open = text_.find('(', at_), close = text_.find("\n)", open), body = text_.find("\n{", close);
  kernel_.name = std::string(Trim(std::string_view(text_).substr(at_, open - at_)));
  for (const std::string& text : SplitOperands(std::string_view(text_).substr(open + 1, close - open - 1))) {
    Variable parameter = ParseVariable(text);
    const int align = parameter.align;
    parameter.address = static_cast<uint64_t>((kernel_.parameter_bytes + align - 1) / align * align);
    kernel_.parameter_bytes = static_cast<int>(parameter.address) + parameter.bytes;
    kernel_.parameters.push_back(parameter);
  }
  const std::string_view directives = std::string_view(text_).substr(close, body - close);
  const size_t most = directives.find(".maxntid");
  if (most != std::string_view::npos) {
    kernel_.max_threads = static_cast<uint32_t>(AsInteger(directives.substr(most + 9)));
  }
  const std::string_view header = std::string_view(text_).substr(at_, body + 1 - at_);
  line_ += static_cast<int>(std::count(header.begin(), header.end(), '\n'));
  at_ = body + 2;
}

void Parser::SkipSpace() {
  for (; at_ < text_.size(); ++at_) {
    if (text_.compare(at_, 2, "//") == 0) at_ = std::min(text_.find('\n', at_), text_.size() - 1);
    if (!IsSpace(text_[at_])) return;
    line_ += text_[at_] == '\n';
  }
}

void Parser::ParseBody() {
  scopes_.emplace_back();
  NewRegister();  // kNoRegister
  constants_[0] = kNoRegister;
  for (;;) {
    SkipSpace();
    if (at_ >= text_.size()) Refuse("unknown", "the end of the file inside of a kernel");
    if (text_[at_] == '{') {
      scopes_.emplace_back();
      ++at_;
    } else if (text_[at_] == '}') {
      scopes_.pop_back();
      ++at_;
      if (scopes_.empty()) return;
    } else {
      position.line = line_;
      const size_t end = text_.find_first_of(";:", at_);
      // `::` is a part of opcodes such as cp.async.cg.shared.global.L2::128B.
      const size_t semicolon = text_.find(';', at_);
      const bool is_label = text_[end] == ':' && text_[end + 1] != ':' && text_.find('\n', at_) > end;
      const std::string_view statement = Trim(std::string_view(text_).substr(at_, (is_label ? end : semicolon) - at_));
      line_ += static_cast<int>(std::count(statement.begin(), statement.end(), '\n'));
      at_ = (is_label ? end : semicolon) + 1;
      if (is_label) {
        labels_[std::string(statement)] = static_cast<int>(kernel_.code.size());
      } else if (statement[0] == '.') {
        Declare(statement);
      } else {
        Decode(statement);
      }
    }
  }
}

void Parser::Declare(std::string_view statement) {
  const auto words = Words(statement);
  if (words[0] == ".pragma") return;
  if (words[0] == ".shared") {
    kernel_.shared.push_back(ParseVariable(statement));
    return;
  }
  if (words[0] != ".reg") Refuse("unknown", "directive " + std::string(statement));
  // A name, or name<count> (10.1).
  for (const std::string& name : SplitOperands(statement.substr(statement.find(words[1]) + words[1].size()))) {
    const size_t bracket = name.find('<');
    if (bracket == std::string::npos) {
      scopes_.back()[name] = NewRegister();
      continue;
    }
    const int count = AsInteger(std::string_view(name).substr(bracket + 1));
    for (int i = 0; i < count; ++i) scopes_.back()[name.substr(0, bracket) + std::to_string(i)] = NewRegister();
  }
}

void Parser::Decode(std::string_view statement) {
  Instruction in;
  in.line = position.line;
  if (statement[0] == '@') {
    const size_t space = statement.find_first_of(" \t");
    std::string guard(statement.substr(1, space - 1));
    in.guard_is_negated = guard[0] == '!';
    in.guard = Source(guard.substr(in.guard_is_negated));
    statement = Trim(statement.substr(space));
  }
  const size_t space = std::min(statement.find_first_of(" \t\n"), statement.size());
  const std::string opcode(statement.substr(0, space));
  const std::vector<std::string> operands = SplitOperands(statement.substr(space));
  // 9.7.12.3, bra; 9.7.12.6, ret; 9.7.12.7, exit.
  if (opcode == "bra" || opcode == "bra.uni") {
    in.flow = Flow::kBranch;
    branches_.emplace_back(operands.at(0), kernel_.code.size());
  } else if (opcode == "ret" || opcode == "exit") {
    in.flow = Flow::kReturn;
  } else {
    bool is_known = false;
    for (Decoder decode : {DecodeArithmetic, DecodeMove, DecodeAccess, DecodeCollective, DecodeWarpgroup,
                           DecodeBulk}) {
      if ((is_known = decode(*this, opcode, operands, &in))) break;
    }
    if (!is_known) Refuse("unknown", "instruction " + opcode);
  }
  kernel_.code.push_back(in);
}

const int* Parser::Lookup(const std::string& name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto at = scope->find(name);
    if (at != scope->end()) return &at->second;
  }
  return nullptr;
}

int Parser::Result(const std::string& operand) {
  if (operand == "_") return -1;
  const int* index = Lookup(operand);
  if (!index) Refuse("unknown", "register " + operand);
  return *index;
}

int Parser::Special(int* slot) {
  if (*slot < 0) *slot = NewRegister();
  return *slot;
}

int Parser::Constant(uint64_t value) {
  const auto [at, is_new] = constants_.try_emplace(value, kernel_.registers);
  if (is_new) NewRegister();
  return at->second;
}

int Parser::Source(const std::string& operand) {
  uint64_t value;
  if (ParseNumber(operand, &value)) return Constant(value);
  if (const int* index = Lookup(operand)) return *index;
  // 10, special registers.
  if (operand == "%tid.x") return Special(&kernel_.thread_index);
  if (operand == "%ctaid.x") return Special(&kernel_.block_index);
  if (operand == "%ntid.x") return Special(&kernel_.block_size);
  if (operand == "%nctaid.x") return Special(&kernel_.grid_size);
  if (operand == "%laneid") return Special(&kernel_.lane_index);
  const auto [name, offset] = SplitOffset(operand);
  if (AddressOfVariable(name, &value)) return Constant(value + static_cast<uint64_t>(offset));
  Refuse("unknown", "operand " + operand);
}

bool Parser::AddressOfVariable(const std::string& name, uint64_t* address) {
  for (const Variable& parameter : kernel_.parameters) {
    if (parameter.name != name) continue;
    *address = kParameterBase + parameter.address;
    return true;
  }
  for (Variable& variable : kernel_.shared) {
    if (variable.name != name) continue;
    PlaceShared(&variable);
    *address = variable.address;
    return true;
  }
  for (const Variable& variable : file_shared_) {
    if (variable.name != name) continue;
    kernel_.shared.push_back(variable);
    PlaceShared(&kernel_.shared.back());
    *address = kernel_.shared.back().address;
    return true;
  }
  return false;
}

// Gives a variable an address that is no more aligned than it has to be, and a gap after it.
void Parser::PlaceShared(Variable* variable) {
  if (variable->address != 0) return;
  const auto align = static_cast<uint64_t>(variable->align);
  uint64_t address = (std::max(kernel_.shared_end, kSharedBase) + align - 1) / align * align;
  if (address % (2 * align) == 0) address += align;
  variable->address = address;
  kernel_.shared_end = address + static_cast<uint64_t>(variable->bytes) + 64;
}

void Parser::Address(const std::string& operand, size_t slot, Instruction* in) {
  if (operand.size() < 3 || operand[0] != '[') Refuse("unknown", "address " + operand);
  const auto [base, offset] = SplitOffset(std::string_view(operand).substr(1, operand.size() - 2));
  in->from[slot] = Source(base);
  in->offset = offset;
}

int Parser::Results(const std::string& operand, Instruction* in) {
  if (operand[0] != '{') {
    in->to[0] = Result(operand);
    return 1;
  }
  const auto parts = SplitOperands(std::string_view(operand).substr(1, operand.size() - 2));
  for (size_t i = 0; i < parts.size(); ++i) in->to.at(i) = Result(parts[i]);
  return static_cast<int>(parts.size());
}

int Parser::Sources(const std::string& operand, size_t slot, Instruction* in) {
  if (operand[0] != '{') {
    in->from.at(slot) = Source(operand);
    return 1;
  }
  const auto parts = SplitOperands(std::string_view(operand).substr(1, operand.size() - 2));
  for (size_t i = 0; i < parts.size(); ++i) in->from.at(slot + i) = Source(parts[i]);
  return static_cast<int>(parts.size());
}

std::vector<int> Parser::Registers(const std::string& operand) {
  std::vector<int> registers;
  for (const std::string& part : SplitOperands(std::string_view(operand).substr(1, operand.size() - 2))) {
    registers.push_back(Result(part));
  }
  return registers;
}

bool DecodeByOpcode(const std::unordered_map<std::string, Action>& actions, Parser& parser, const std::string& opcode,
                    const std::vector<std::string>& operands, Instruction* in) {
  const auto action = actions.find(opcode);
  if (action == actions.end()) return false;
  in->action = action->second;
  in->to[0] = parser.Result(operands.at(0));
  for (size_t i = 1; i < operands.size(); ++i) in->from.at(i - 1) = parser.Source(operands[i]);
  return true;
}

}  // namespace ptx
