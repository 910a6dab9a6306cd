{{/* The pod of a stage as the operators know it: `pod` and `kinds` of files/pod.yaml, a file of the package. */}}
{{- define "batchllm.said" -}}
{{- required "files/pod.yaml is missing: it is a symbolic link in the repository, which your copy of the chart lacks" (.Files.Get "files/pod.yaml") -}}
{{- end -}}

{{/*
A pod template for Airflow's pod_template_file. The operator adds name, command and its own labels.
Arguments: root, kind (gpu or cpu), gpu (nvidia, amd or cpu), image, preset (gpu.nvidia, gpu.amd or cpu), user, group,
gpuResource (such as nvidia.com/gpu, empty for none).
*/}}
{{- define "batchllm.pod" -}}
{{- $values := .root.Values -}}
apiVersion: v1
kind: Pod
metadata:
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- toYaml (merge (dict "app.kubernetes.io/name" "batchllm") $values.pods.labels) | nindent 4 }}
  {{- with include "batchllm.podAnnotations" . | fromYaml }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  activeDeadlineSeconds: {{ int64 $values.pods.activeDeadlineSeconds }}
  terminationGracePeriodSeconds: {{ int64 $values.pods.terminationGracePeriodSeconds }}
  serviceAccountName: {{ include "batchllm.serviceAccountName" . | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with include "batchllm.priorityClassName" .root }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with include "batchllm.imagePullSecrets" .root }}
  imagePullSecrets:
    {{- trim . | nindent 4 }}
  {{- end }}
  {{- range $name := list "runtimeClassName" "schedulerName" }}
  {{- with index $values.pods $name }}
  {{ $name }}: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- range $name := list "affinity" "topologySpreadConstraints" "initContainers" }}
  {{- with index $values.pods $name }}
  {{ $name }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with .preset.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .preset.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "batchllm.podSecurityContext" (merge (dict "supplementalGroups" (default list .preset.supplementalGroups)) .) | nindent 4 }}
  containers:
    - name: base
      image: {{ include "batchllm.image" . | quote }}
      imagePullPolicy: {{ $values.images.pullPolicy }}
      env:
        {{- include "batchllm.env" .root | trim | nindent 8 }}
        {{- with include "batchllm.kindEnv" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $values.pods.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if and (include "batchllm.servesMetrics" .) (not (hasKey $values.pods.env "BATCHLLM_METRICS_PORT")) }}
        - name: BATCHLLM_METRICS_PORT
          value: {{ printf "0.0.0.0:%d" (int64 $values.monitoring.metrics.port) | quote }}
        {{- end }}
      {{- with include "batchllm.envFrom" . }}
      envFrom:
        {{- trim . | nindent 8 }}
      {{- end }}
      {{- if include "batchllm.servesMetrics" . }}
      ports:
        - name: metrics
          containerPort: {{ int64 $values.monitoring.metrics.port }}
      {{- end }}
      resources:
        {{- include "batchllm.resources" . | nindent 8 }}
      securityContext:
        {{- include "batchllm.containerSecurityContext" .root | nindent 8 }}
      volumeMounts:
        {{- include "batchllm.volumeMounts" .root | nindent 8 }}
  volumes:
    {{- include "batchllm.volumes" .root | nindent 4 }}
{{- end -}}

{{/* Requests and limits. GPUs are strings, because some servers refuse numbers. Slices of GPUs that are named come alone. */}}
{{- define "batchllm.resources" -}}
{{- $resources := deepCopy .preset.resources -}}
{{- $names := concat (keys (default dict $resources.requests)) (keys (default dict $resources.limits)) | join " " -}}
{{- if and .gpuResource (not (regexMatch "(nvidia|amd)[.]com/(gpu[.-]|mig-|[sdqc]px_nps)" $names)) -}}
{{- range $part := list "requests" "limits" -}}
{{- $gpus := dict $.gpuResource (toString (int64 $.preset.count)) -}}
{{- $_ := set $resources $part (merge $gpus (default dict (index $resources $part))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
